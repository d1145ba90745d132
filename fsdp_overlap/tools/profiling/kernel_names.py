"""Names of kernels that communicate."""

import re
from functools import lru_cache

from fsdp_overlap.tools.profiling.events import COLLECTIVE_NAME, TraceEvent

# At the beginning of a name or of a part of it. First libraries and namespaces all of whose kernels
# communicate: NCCL, RCCL, UCCL, MSCCL and MSCCL++, HCCL, oneCCL, SHMEM's, DeepEP, MORI, torch's
# symmetric memory, Transformer Engine's userbuffers, AMD's quick reduce. Then kernels of torch's
# symmetric memory, FBGEMM, vLLM, SGLang, AITER, TensorRT-LLM, flashinfer and MORI.
_KNOWN = re.compile(
    r"(?:^|::|\d)_?(?:"
    r"[nrpu]ccl|msccl|hccl|hcom_|oneccl|(?:nv|roc|i)shmem|deep_ep|hybrid_ep|mori::|symmetric_memory"
    r"|k?userbuffers|quickreduce|trtllm_(?:\w+_)?all_?(?:reduce|to_?all)"
    r"|(?:\w+_)?(?:one|two)_?shot_?all_?reduce|multimem_(?:\w+_)?(?:all_|reduce_scatter)|alltoallv"
    r"|cross_device_(?:all_|reduce)|reduce_scatter_cross_device|allgather_(?:vec|lastdim|naive)"
    r"|all_?reduce_(?:fusion_kernel|prototype)|mnnvl_lamport|moe(?:a2a|alltoall)"
    r"|ep(?:dispatch|combine)int(?:ra|er)node)"
)
_SUGGESTS = re.compile(
    r"(?<!warp)(?<!block)(?<!warp_)(?<!block_)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|send_?recv|cross_device|multimem|nvls|nvlink|symm_?mem|rdma|ibgda|(?<![a-z])(?:a2a|p2p)"
)
# What computes, too, and nobody knows for how long.
_WITH_PRODUCT = re.compile(r"(?<!fb)gemm|matmul")  # the library FBGEMM has collectives
# Inductor names a kernel for all that it fused, such as the wait for a collective.
_OF_INDUCTOR = re.compile(r"^triton_[a-z]+_fused")


@lru_cache(10_000)
def short_name(name: str) -> str:
    """Return a kernel's name without its arguments, the template's too, and the type it returns."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name


def collective_of(kernel: TraceEvent) -> str | None:
    """Return the collective that a kernel, or a copy, is of; None if it is not known to be of
    one."""
    if name := kernel.args.get(COLLECTIVE_NAME):
        return str(name)
    return short_name(kernel.name) if _is_known(kernel.name) else None


def may_communicate(name: str) -> bool:
    """Return whether the name of a kernel suggests a collective."""
    name = short_name(name).lower()
    found = _SUGGESTS.search(name) or _KNOWN.search(name)
    return found is not None and not _OF_INDUCTOR.search(name)


@lru_cache(10_000)
def _is_known(name: str) -> bool:
    name = short_name(name).lower()
    return _KNOWN.search(name) is not None and not _WITH_PRODUCT.search(name)
