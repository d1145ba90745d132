"""Which kernels of a trace are collectives, and what the report says of those it cannot tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.tools.cli.report import show_report
from fsdp_overlap.tools.profiling import RankReport, diagnose, read_report
from fsdp_overlap.tools.profiling.html import write_html
from fsdp_overlap.tools.profiling.json_report import write_json
from support.traces import MAIN, Event, Step, event, read, trace_of

NAMED = {"Collective name": "allreduce"}


def kernel(name: str, start: float, end: float, stream: int, device: int = 0, **args: Any) -> Event:
    about = {"stream": stream, "device": device, **args}
    return event(name, start, end, tid=stream, cat="kernel", args=about)


def beside(name: str, *more: Event, **args: Any) -> RankReport:
    """Return of a kernel that runs for 2500 us, 1000 of them without compute."""
    computing = [kernel("sgemm", 0, 4000, 7), kernel("sgemm", 5000, 9000, 7)]
    return read(*computing, kernel(name, 3000, 5500, 20, **args), *more)


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllGather_LL(x)",
        "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
        "mscclpp::allreduce7(x)",
        "void mscclpp::collective::allreducePacket<(Op)0, float>(x)",
        "hcom_allReduce__606_0_1",
        "oneccl_allreduce_pcie",
        "void two_shot_all_reduce_kernel<c10::Half, 16, 8>(c10::Half**)",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**)",
        "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(x)",
        "void c10d::(anonymous namespace)::multimem_all_gather_kernel<16>(x)",
        "void deep_ep::internode::dispatch<false, 4>(x)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(x)",
        "void hybrid_ep::dispatch_kernel<8>(x)",
        "void uccl::internode::dispatch<false, 4>(x)",
        "void fbgemm_gpu::one_shot_all_reduce<at::BFloat16, 8>(x)",
        "nvshmemi_alltoall_on_stream_kernel(x)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "void aiter::reduce_scatter_cross_device_store<bf16, 8>(x)",
        "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half>>(x)",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 8>(AllReduceParams)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(x)",
        "void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<float>(x)",
        "moeA2ADispatchKernel(int const*)",
        "EpDispatchIntraNodeKernel_bf16",
        "void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int)",
        "_multimem_all_gather_kernel",
    ],
)
def test_kernels_of_known_libraries_are_collectives(name: str) -> None:
    report = beside(name)
    assert (report.exposed_time, report.unknown_kernels) == (1000, ())
    assert "<" not in report.collectives[0].name


def test_what_carries_the_name_of_a_collective_is_one() -> None:
    report = beside("whatever(x)", **NAMED)
    assert (report.exposed_time, report.collectives[0].name) == (1000, "allreduce")
    copied = event("Memcpy PtoP", 3000, 5500, cat="gpu_memcpy", args={"stream": 20, **NAMED})
    report = read(kernel("sgemm", 0, 4000, 7), kernel("sgemm", 5000, 9000, 7), copied)
    assert (report.exposed_time, len(report.collectives)) == (1000, 1)


def test_on_a_cpu_ops_that_carry_it_are_collectives_and_records_of_calls_are_not() -> None:
    def op(name: str, start: float, end: float, **args: Any) -> Event:
        return event(name, start, end, cat="cpu_op", args=args)

    report = read(
        op("aten::mm", 0, 100),
        op("record_param_comms", 100, 110, **NAMED),
        op("mylib::reduce", 110, 150, **NAMED),
        op("oneccl_bindings_for_pytorch::allreduce", 150, 200),
        op("aten::mm", 200, 300),
    )
    found = [(c.name, c.exposed) for c in report.collectives]
    assert found == [("allreduce", 40), ("allreduce", 50)]
    assert report.compute_time == 200


@pytest.mark.parametrize(
    "name",
    [
        "void warpAllReduceSoftmax<float>(x)",
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
        "void cutlass::Kernel2<all_reduce_like_argument>(x)",
        "cuApplyLayerNorm_shmem",
    ],
)
def test_compute_is_not_taken_for_a_collective(name: str) -> None:
    # Started by an op of torch, as compute on a stream of collectives is.
    launches = [
        event("aten::add", 0, 10),
        event("cudaLaunchKernel", 1, 2, MAIN, cat="cuda_runtime", args={"correlation": 1}),
    ]
    reduced = kernel("ncclDevKernel_AllReduce", 5000, 5001, 20)
    reduced_again = kernel("ncclDevKernel_AllReduce", 5001, 5002, 20)
    nameless = {"Collective name": ""}
    report = beside(name, *launches, reduced, reduced_again, correlation=1, **nameless)
    assert (report.exposed_time, report.unknown_kernels) == (0, ())


def test_what_cannot_be_told_is_listed_with_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a name that suggests a collective, alone or beside a product, or by a stream of
    collectives."""
    trace = trace_of(
        kernel("sgemm", 0, 4000, 7),
        kernel("void my_all_gather<float>(x)", 0, 1000, 8),
        kernel("one_shot_all_reduce_gemm", 1000, 3000, 8),
        *(kernel("ncclDevKernel_AllReduce", k, k + 1, 20) for k in range(3)),
        kernel("what_is_it", 100, 600, 20),
    )
    report = read_report(trace, steps=2)
    (rank,) = report.ranks
    unknown = {"one_shot_all_reduce_gemm": 2000, "my_all_gather": 1000, "what_is_it": 500}
    assert dict(rank.unknown_kernels) == unknown
    assert rank.compute_time == 4000
    said = "one_shot_all_reduce_gemm 1.00 ms, my_all_gather 0.50 ms, what_is_it 0.25 ms a step"
    (finding,) = [found for found in diagnose(report) if found.cause == "unknown kernels"]
    assert (finding.cost, said in finding.text) == (1750, True)
    show_report({"run": report})
    assert said in capsys.readouterr().out
    write_html({"run": report}, tmp_path / "page.html")
    assert said in (tmp_path / "page.html").read_text()
    write_json({"run": report}, tmp_path / "report.json")
    (written,) = json.loads((tmp_path / "report.json").read_text())["runs"]["run"]["ranks"]
    assert written["unknown_kernels"] == unknown


def test_of_several_devices_the_one_with_collectives_is_judged() -> None:
    other = kernel("sgemm", 4000, 5000, 7, device=1)
    report = read_report(trace_of(*gathered(0), other))
    (rank,) = report.ranks
    assert (rank.exposed_time, rank.other_devices) == (1000, (("1", 1000),))
    (finding,) = [found for found in diagnose(report) if found.cause == "other devices"]
    assert "kernels of other devices are left out: device 1 1.00 ms a step" in finding.text
    with pytest.raises(ValueError, match="collectives ran on devices 0, 1, and a report"):
        read(*gathered(0), *gathered(1))


def gathered(device: int) -> list[Event]:
    name = "ncclDevKernel_AllGather"
    computing = [kernel("sgemm", at, at + 4000, 7, device) for at in (0, 5000)]
    return [*computing, kernel(name, 3000, 5500, 20, device)]


@pytest.mark.parametrize("duration", [-1, 2**64 / 1000, math.inf, math.nan])
@pytest.mark.parametrize("category", ["kernel", "cpu_op", "user_annotation"])
@pytest.mark.parametrize("is_file", [False, True])
def test_events_of_impossible_duration_are_left_out_and_counted(
    tmp_path: Path, duration: float, category: str, is_file: bool
) -> None:
    bad = event("fsdp_overlap::all_gather(a)", 1, 1, cat=category) | {"dur": duration}
    trace: Any = trace_of(*Step().events, bad, bad)
    if is_file:
        source = tmp_path / "trace.json"
        source.write_text(json.dumps(trace))
        trace = source
    report = read_report(trace)
    good = read_report(trace_of(*Step().events)).ranks[0]
    assert report.ranks[0].left_out == 2
    assert report.ranks[0].duration == good.duration
    assert report.ranks[0].exposed_time == good.exposed_time
    (finding,) = [found for found in diagnose(report) if found.cause == "left out"]
    assert "left out: 2 events with a duration that is negative or longer" in finding.text
