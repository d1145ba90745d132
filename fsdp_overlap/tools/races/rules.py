"""The rules that findings break. Each is one that the documents of CUDA, PyTorch or NCCL state."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_overlap.tools.emulator import Finding

_TORCH = "https://docs.pytorch.org/docs/stable"
_TUTORIALS = "https://docs.pytorch.org/tutorials"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs"


class Rule(NamedTuple):
    """A rule, and where it is stated."""

    text: str
    source: str
    url: str


RULES = {
    "streams": Rule(
        "Operations of different streams run in any order, or at the same time, unless a wait "
        "(wait_stream(), wait_event(), synchronize()) orders them. On streams of its own the "
        "program has to wait.",
        "PyTorch, CUDA semantics, CUDA streams",
        f"{_TORCH}/notes/cuda.html#cuda-streams",
    ),
    "collective": Rule(
        "The output of an asynchronous collective can be used, and its input be overwritten, on "
        "the stream that was current when work.wait() was called, after that call. Other streams "
        "have to wait by themselves.",
        "PyTorch, torch.distributed, Synchronous and asynchronous collective operations",
        f"{_TORCH}/distributed.html#synchronous-and-asynchronous-collective-operations",
    ),
    "host": Rule(
        "Copies between the device and pinned memory with non_blocking=True are asynchronous to "
        "the host. Before it reads what is copied to it, or overwrites what is copied from it, "
        "the host has to synchronize with the stream, an event or the device.",
        "CUDA Runtime API, API synchronization behavior; PyTorch, A guide on good usage of "
        "non_blocking and pin_memory()",
        f"{_TUTORIALS}/intermediate/pinmem_nonblock.html",
    ),
    "reuse": Rule(
        "The caching allocator knows only the stream that a tensor was allocated on, and may give "
        "its memory to another tensor as soon as it is freed. If other streams use it, they have "
        "to be recorded by record_stream(), or that stream has to wait for them first.",
        "PyTorch, torch.Tensor.record_stream",
        f"{_TORCH}/generated/torch.Tensor.record_stream.html",
    ),
    "freed": Rule(
        "Memory that was freed, as by resizing its storage to nothing, belongs to the caching "
        "allocator, which gives it to other tensors or back to the device.",
        "PyTorch, CUDA semantics, Memory management",
        f"{_TORCH}/notes/cuda.html#memory-management",
    ),
    "context": Rule(
        "Each rank has a GPU of its own, which has to be made the current device by "
        "torch.cuda.set_device(). A thread begins with the first one.",
        "PyTorch, torch.distributed, Collective functions",
        f"{_TORCH}/distributed.html#collective-functions",
    ),
    "order": Rule(
        "Ranks that use several communicators at the same time have to submit their operations "
        "in the same order, or they can deadlock.",
        "NCCL, Using multiple NCCL communicators concurrently",
        f"{_NCCL}/usage/communicators.html#using-multiple-nccl-communicators-concurrently",
    ),
    "sync": Rule(
        "An operation that makes the host wait for the device keeps it from running ahead, and "
        "the device may have nothing to do meanwhile. This is no fault.",
        "PyTorch, Performance Tuning Guide, Avoid unnecessary CPU-GPU synchronization",
        f"{_TUTORIALS}/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
    ),
}
"""By name. Races have several, of which :attr:`Finding.rule` names one; other findings have that of
their kind."""


def name_of_rule(finding: Finding) -> str:
    """Return the name of the rule that ``finding`` breaks."""
    return finding.rule or finding.kind
