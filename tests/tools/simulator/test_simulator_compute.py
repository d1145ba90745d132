"""What one operation costs. Published figures name their source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # defines operators
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_overlap.tools.simulator.compute_time import bytes_moved, flops_of, seconds_of
from fsdp_overlap.tools.simulator.hardware import Device
from fsdp_overlap.tools.simulator.tables import HardwareError, shipped

H100 = Device.read("h100_sxm")
A100 = Device.read("a100_sxm")
aten = torch.ops.aten


class Costs(TorchDispatchMode):
    """Adds up what operations cost on a device, and notes the bytes and FLOPs of each."""

    def __init__(self, device: Device = H100) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0
        self.ops: list[tuple[str, int, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        seconds = seconds_of(self.device, func, args, kwargs, outputs)
        if seconds:
            moved = bytes_moved(func, args, kwargs or {}, outputs)
            flops = flops_of(func, args, kwargs or {}, outputs)
            self.ops.append((func.overloadpacket.__name__, moved, flops))
        self.seconds += seconds
        return outputs


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def product(device: Device, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> float:
    with Costs(device) as costs:
        empty(m, k, dtype=dtype) @ empty(k, n, dtype=dtype)
    return costs.seconds


# Measured, of products that the efficiencies are not taken from: (device, m, n, k, TFLOP/s)
SQUARES = "zzc0721/torch-performance-test-data, issue 79: H100 80GB, torch 2.7"
ROWS = "vllm-project/vllm, pull request 49363: H100"
MEASURED = [
    ("h100_sxm", 2048, 2048, 2048, 676.59, SQUARES),
    ("h100_sxm", 4096, 4096, 4096, 788.72, SQUARES),
    ("h100_sxm", 8192, 8192, 8192, 797.51, SQUARES),
    ("h100_sxm", 10240, 10240, 10240, 719.72, SQUARES),
    ("h100_sxm", 64, 12288, 5376, 182.58, ROWS),  # bytes decide
    ("h100_sxm", 128, 12288, 5376, 352.56, ROWS),
    ("h100_sxm", 128, 43008, 5376, 364.75, ROWS),
]


@pytest.mark.parametrize(("name", "m", "n", "k", "teraflops", "source"), MEASURED)
def test_products_take_what_was_measured(
    name: str, m: int, n: int, k: int, teraflops: float, source: str
) -> None:
    measured = 2 * m * n * k / (teraflops * 1e12)
    assert product(Device.read(name), m, n, k) == pytest.approx(measured, rel=0.1), source


def product_in_float8(m: int, n: int, k: int) -> float:
    left, right = [empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n)]
    args = (left, right.t(), empty(1), empty(1))
    return seconds_of(H100, aten._scaled_mm.default, args, {}, empty(m, n))


# Measured in FP8 on an H800, which computes as an H100 does: DeepSeek's DeepGEMM, the table of its
# first README, which is of kernels of its own.
FLOAT8 = [
    (64, 7168, 16384, 336),
    (128, 7168, 16384, 645),
    (4096, 4096, 7168, 1304),
    (4096, 7168, 16384, 1358),
]
# Tiles of these do not fill the device, or little is added up; the model knows neither.
FLOAT8_MISSED = [(64, 2112, 7168, 206), (4096, 2112, 7168, 1058), (4096, 7168, 2048, 1025)]


@pytest.mark.parametrize(("m", "n", "k", "teraflops"), FLOAT8)
def test_products_in_float8_take_what_was_measured(
    m: int, n: int, k: int, teraflops: float
) -> None:
    measured = 2 * m * n * k / (teraflops * 1e12)
    assert product_in_float8(m, n, k) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(("m", "n", "k", "teraflops"), FLOAT8_MISSED)
def test_narrow_products_take_a_fourth_more_than_the_model_says(
    m: int, n: int, k: int, teraflops: float
) -> None:
    measured = 2 * m * n * k / (teraflops * 1e12)
    assert 1.2 < measured / product_in_float8(m, n, k) < 1.35


def test_attention_takes_what_its_kernel_reaches() -> None:
    q = empty(2, 16, 8192, 128)
    seconds = {}
    for is_causal in (False, True):
        with Costs() as costs:
            F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)
        seconds[is_causal] = costs.seconds - H100.kernel_seconds
    assert seconds[False] == pytest.approx(4 * 2 * 16 * 8192**2 * 128 / (0.35 * 989e12))
    assert seconds[True] == pytest.approx(seconds[False] / 2)


@pytest.mark.parametrize(
    ("size", "measured"), [(1024, 177), (2048, 677), (4096, 789), (8192, 798), (10240, 720)]
)
def test_products_take_what_was_measured_by_their_size(size: int, measured: float) -> None:
    """https://github.com/zzc0721/torch-performance-test-data/issues/79. The last is where the
    measured one slows down again, which no other source says."""
    with Costs() as costs:
        torch.mm(empty(size, size), empty(size, size))
    rate = 2 * size**3 / costs.seconds
    assert rate == pytest.approx(measured * 1e12, rel=0.11 if size == 10240 else 0.02)


def test_another_kernel_of_attention_has_another_rate() -> None:
    q = empty(1, 16, 8192, 128)
    seconds = []
    for kernel in ("flash", "cudnn"):
        with Costs(H100.with_attention(kernel)) as costs:
            F.scaled_dot_product_attention(q, q, q)
        seconds.append(costs.seconds - H100.kernel_seconds)
    assert seconds[0] / seconds[1] == pytest.approx(0.62 / 0.35)
    with pytest.raises(HardwareError, match="no rate for attention by 'cudnn'; there are flash"):
        A100.with_attention("cudnn")


def test_attention_backward_does_two_and_a_half_times_as_much() -> None:
    q = empty(1, 8, 4096, 64).requires_grad_()
    with Costs() as costs:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    flops = [flops for name, _, flops in costs.ops if "attention" in name]
    assert flops == [2 * 8 * 4096**2 * 64, 5 * 8 * 4096**2 * 64]


def test_a_step_of_a_linear_layer_is_three_products() -> None:
    x, weight = empty(4096, 1024).requires_grad_(), empty(2048, 1024).requires_grad_()
    with Costs() as costs:
        F.linear(x, weight).sum().backward()
    assert [flops for _, _, flops in costs.ops if flops] == [2 * 4096 * 1024 * 2048] * 3


def test_products_of_experts_are_those_of_their_rows() -> None:
    x, experts = empty(96, 32), empty(4, 32, 16)
    ends = torch.tensor([16, 32, 64, 96], dtype=torch.int32)
    by_rows = aten._grouped_mm.default
    assert flops_of(by_rows, (x, experts, ends), {}, empty(96, 16)) == 2 * 96 * 32 * 16
    of_weights = (empty(32, 96), empty(96, 16), ends)
    assert flops_of(by_rows, of_weights, {}, empty(4, 32, 16)) == 2 * 96 * 32 * 16


@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 1 << 28])
def test_what_is_no_product_takes_its_bytes(size: int) -> None:
    a = empty(size)
    with Costs() as costs:
        a + a.detach()
    bytes_a_second = 3.35e12 * 0.92
    assert costs.seconds == pytest.approx(2e-6 + 3 * 2 * size / bytes_a_second)


def moved_by(run: Any) -> list[int]:
    with Costs() as costs:
        run()
    return [moved for _, moved, _ in costs.ops]


def test_views_allocations_and_questions_are_free() -> None:
    a = empty(64, 64)
    assert not moved_by(lambda: (a.view(-1), a.t(), a[1:], a.detach(), torch.empty_like(a)))
    assert not moved_by(
        lambda: (a.device, a.shape, a.new_empty(5), a.split(32), a.expand(2, 64, 64))
    )


def test_bytes_are_those_that_are_read_and_written() -> None:
    a, b = empty(1000), empty(1000)
    table, rows = empty(50_000, 64), torch.zeros(10, dtype=torch.int64)
    assert moved_by(lambda: a.add_(b)) == [3 * 2000]
    assert moved_by(lambda: a.copy_(b)) == [2 * 2000]
    assert moved_by(lambda: a.zero_()) == [2000]
    assert moved_by(lambda: torch.sum(a)) == [2000 + 2]
    assert moved_by(lambda: torch._foreach_mul_([a, b], 2.0)) == [4 * 2000]
    assert moved_by(lambda: torch._foreach_copy_([a], [b])) == [2 * 2000]
    assert moved_by(lambda: F.embedding(rows, table)) == [2 * 10 * 64 * 2 + 80]
    assert moved_by(lambda: table[rows]) == [2 * 10 * 64 * 2 + 80]
    assert moved_by(lambda: table.index_add_(0, rows, empty(10, 64))) == [80 + 3 * 10 * 64 * 2]
    one_row = empty(1, 1000).expand(64, 1000)
    assert moved_by(lambda: one_row.clone(memory_format=torch.contiguous_format)) == [65 * 2000]


def test_fsdp2s_copies_read_and_write_what_they_copy() -> None:
    ranks, ops = 8, torch.ops.fsdp
    shards = [empty(100), empty(28)]
    whole, parts = empty(ranks * 128), [empty(ranks, 100), empty(ranks, 28)]
    sizes = [100, 28]
    copy_in = ops.all_gather_copy_in.default
    assert bytes_moved(copy_in, (shards, whole, sizes, 128, 3), {}, ()) == 2 * 128 * 2
    split, cat = ops.split_with_sizes_copy.default, ops.chunk_cat.default
    rows = whole.view(ranks, -1)
    assert bytes_moved(split, (rows, sizes, 1), {"out": parts}, None) == 2 * ranks * 128 * 2
    reduced = empty(ranks, 128, dtype=torch.float32)
    assert bytes_moved(cat, (parts, 0, ranks), {"out": reduced}, None) == ranks * 128 * (2 + 4)


def test_the_optimizer_reads_four_tensors_and_writes_three() -> None:
    parameter = torch.nn.Parameter(empty(1000, dtype=torch.float32))
    parameter.grad = torch.empty_like(parameter)
    state = [torch.empty_like(parameter) for _ in range(2)]
    step = torch.ones(())
    lists = ([parameter], [parameter.grad], [state[0]], [state[1]], [], [step])
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    assert bytes_moved(aten._fused_adamw_.default, lists, options, None) == 7 * 4000 + 4


def test_more_work_never_takes_less_time() -> None:
    for name in shipped("device"):
        device = Device.read(name)
        times = [product(device, m, 4096, 4096) for m in (1, 16, 256, 257, 4096, 65536)]
        assert times == sorted(times)


def test_float32_is_rounded_where_the_program_allows_it() -> None:
    exact = product(A100, 4096, 4096, 4096, torch.float32)
    torch.set_float32_matmul_precision("high")
    rounded = product(A100, 4096, 4096, 4096, torch.float32)
    assert exact / rounded == pytest.approx(156 / 19.5, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_products_of_other_dtypes_are_as_those_of_float32(dtype: torch.dtype) -> None:
    assert product(H100, 4096, 4096, 4096, dtype) == product(H100, 4096, 4096, 4096, torch.float32)


def test_a_device_without_the_dtype_says_what_to_write() -> None:
    left = empty(64, 64, dtype=torch.float8_e4m3fn)
    args = (left, left.t(), empty(1), empty(1))
    with pytest.raises(HardwareError, match=r"A100.*float8.*write a table \[products.float8\]"):
        seconds_of(A100, aten._scaled_mm.default, args, {}, left)


def test_tensors_may_be_on_the_meta_device() -> None:
    with Costs() as costs:
        torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta").mm(
            torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        )
    assert costs.seconds == product(H100, 4096, 4096, 4096)
