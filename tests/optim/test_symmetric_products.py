"""Triton's kernel for symmetric products, run by its interpreter, computes what torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_overlap.layout import TensorAtomic
from fsdp_overlap.optim import Muon, newton_schulz
from fsdp_overlap.optim.newton_schulz import COEFFICIENTS, orthogonalize, polynomials
from fsdp_overlap.tools.races import find_races
from support.defects import Defect
from support.emulated import Program
from support.pages import ROOT
from support.quantized_kernels import needs_triton

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
# One tile, and two, three and four in a row, whole and cut.
SHAPES = pytest.mark.parametrize(
    ("count", "rows", "inner"),
    [(3, 1, 1), (2, 5, 3), (1, 128, 64), (2, 129, 100), (1, 256, 65), (1, 300, 128), (1, 390, 7)],
)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of which at most 256 products have a sum that is exact in bfloat16."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def is_symmetric(product: torch.Tensor) -> bool:
    return torch.equal(product, product.mT)


@needs_triton
@DEVICES
@DTYPES
@SHAPES
def test_products_whose_sums_are_exact_are_exact(
    count: int, rows: int, inner: int, dtype: torch.dtype, device: str
) -> None:
    from fsdp_overlap.optim.symmetric_products import symmetric_product

    x = integers(count, rows, inner).to(device, dtype)
    added = integers(count, rows, rows, seed=1).to(device, dtype)
    added = added + added.mT
    whole = (x.cpu().double() @ x.cpu().double().mT).to(device)
    assert torch.equal(symmetric_product(x, x.mT).double(), whole)
    found = symmetric_product(x, x.mT, added, beta=-4.0, alpha=0.5)
    assert torch.equal(found, (0.5 * whole - 4.0 * added.double()).to(dtype))


@needs_triton
@DEVICES
@DTYPES
@SHAPES
def test_products_equal_those_of_torch_but_for_rounding(
    count: int, rows: int, inner: int, dtype: torch.dtype, device: str
) -> None:
    """Also those of factors that are not each other's transpose, but commute."""
    from fsdp_overlap.optim.symmetric_products import symmetric_product

    x = (normal(count, rows, inner) / inner**0.5).to(device, dtype)
    gram = symmetric_product(x, x.mT)
    change = symmetric_product(gram, gram, gram, beta=-0.3, alpha=0.01)
    product = symmetric_product(change, gram, change, beta=2.0)
    for found, left, right, added, beta, alpha in (
        (gram, x, x.mT, gram, 0.0, 1.0),
        (change, gram, gram, gram, -0.3, 0.01),
        (product, change, gram, change, 2.0, 1.0),
    ):
        assert is_symmetric(found)
        exact = alpha * (left.double() @ right.double()) + beta * added.double()
        bound = (
            alpha * (left.double().abs() @ right.double().abs()) + abs(beta) * added.double().abs()
        )
        # Half of a unit for the result, which the interpreter cuts off, and some for the sums, also
        # where two ways to the same number round apart.
        error = (found.double() - exact).abs()
        units = torch.finfo(dtype).eps * (2 if found is product else 1)
        assert (error <= units * exact.abs() + units * bound / 4 + 1e-6 * bound).all()


@needs_triton
@DEVICES
def test_a_product_that_rounding_makes_unsymmetric_becomes_symmetric(device: str) -> None:
    from fsdp_overlap.optim.symmetric_products import symmetric_product

    x = normal(1, 140, 30).to(device, torch.bfloat16)
    gram = symmetric_product(x, x.mT)
    change = symmetric_product(gram, gram, gram, beta=-0.3, alpha=0.01)
    assert not is_symmetric(change.float() @ gram.float())
    assert is_symmetric(symmetric_product(change, gram, change, beta=2.0))


@needs_triton
@DEVICES
@DTYPES
def test_inputs_need_not_be_contiguous(dtype: torch.dtype, device: str) -> None:
    from fsdp_overlap.optim.symmetric_products import symmetric_product

    x = integers(2, 150, 70).to(device, dtype)
    added = integers(2, 150, 150, seed=1).to(device, dtype)
    added = added + added.mT
    expected = symmetric_product(x, x.mT, added)
    ways = [
        x.mT.contiguous().mT,
        torch.cat([x, x], 2)[:, :, :70],
        torch.cat([x, x], 1)[:, :150],
        torch.stack([x, x], 1)[:, 0],
        torch.stack([x, x], 3)[..., 0],
    ]
    for way in ways:
        assert torch.equal(symmetric_product(way, way.mT, added), expected)
    spread = torch.cat([added, added], 2)[:, :, :150]
    assert torch.equal(symmetric_product(x, x.mT, spread), expected)
    # A product with one matrix for all of a batch.
    one = x[:1].expand(2, -1, -1)
    assert torch.equal(symmetric_product(one, one.mT), expected_of(one))


def expected_of(x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ x.double().mT).to(x.dtype)


@contextmanager
def counting() -> Iterator[list[tuple[int, ...]]]:
    """Let the kernel multiply small matrices on GPUs. Yield the shapes of the left factors that it
    is given."""
    from fsdp_overlap.optim import symmetric_products

    given: list[tuple[int, ...]] = []
    plain = symmetric_products.symmetric_product

    def note(left: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(tuple(left.shape))
        return plain(left, *args, **kwargs)

    with (
        patch.object(symmetric_products, "symmetric_product", note),
        patch.object(newton_schulz, "_KERNEL_ROWS", 1),
        patch.object(newton_schulz, "_KERNEL_ELEMENTS", 1),
    ):
        yield given


@contextmanager
def kernel() -> Iterator[list[tuple[int, ...]]]:
    """As :func:`counting`, on every device and in every dtype."""
    from fsdp_overlap.optim import symmetric_products

    with counting() as given:
        chosen = symmetric_products.symmetric_product
        with patch.object(newton_schulz, "_symmetric_product_for", lambda x: chosen):
            yield given


@needs_triton
@DEVICES
@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(2, 20, 30), (1, 130, 300)])
def test_matrices_are_orthogonalized_as_without_it(
    shape: tuple[int, ...], name: str, device: str
) -> None:
    steps = polynomials(name, 5)
    for dtype, products in ((torch.bfloat16, 10), (torch.float16, None)):
        matrices = normal(*shape).to(device, dtype)
        expected = orthogonalize(matrices.clone(), steps)
        with kernel() as given:
            found = orthogonalize(matrices.clone(), steps)
        assert products is None or len(given) == products  # two a step
        assert given
        error = (found.double() - expected.double()).abs().max()
        assert error < 0.15 * expected.double().abs().max()
        # As near to orthogonal as torch's.
        values = [torch.linalg.svdvals(each.double()) for each in (found, expected)]
        torch.testing.assert_close(*values, rtol=0.05, atol=0.05)


@needs_triton
def test_all_products_of_a_gram_matrix_are_symmetric() -> None:
    """In a segment of several steps too, which 16 bits do not allow."""
    x = normal(2, 20, 60).float()
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    steps = polynomials("quintic", 3)
    expected = newton_schulz._advance(x, steps)
    with kernel() as given:
        found = newton_schulz._advance(x, steps)
    assert given == [(2, 20, 60), *[(2, 20, 20)] * 9]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_large_matrices_on_a_gpu_alone_take_the_kernel() -> None:
    from fsdp_overlap.optim import symmetric_products

    class Shaped:
        """A tensor that is on no device."""

    def chosen(
        count: int,
        rows: int,
        columns: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> bool:
        x: Any = Shaped()
        x.shape, x.itemsize, x.device = (count, rows, columns), dtype.itemsize, torch.device(device)
        return newton_schulz._symmetric_product_for(x) is not newton_schulz._whole_product

    with patch.object(symmetric_products, "works_on", lambda device: True):
        assert chosen(1, 2048, 2048)
        assert chosen(16, 512, 4096, torch.float16)
        assert not chosen(15, 512, 4096)  # not enough tiles
        assert not chosen(100, 500, 4096)
        assert not chosen(1, 2048, 2048, torch.float32)
        assert not chosen(1, 2048, 2048, device="cpu")
        assert not chosen(1, 1 << 16, 1 << 16)  # beyond the kernel's offsets
    with patch.object(symmetric_products, "works_on", lambda device: False):
        assert not chosen(1, 2048, 2048)


@needs_triton
def test_where_the_kernel_does_not_work_torch_multiplies() -> None:
    from fsdp_overlap.optim import symmetric_products

    class Failing:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def __getitem__(self, grid: object) -> Any:
            return self.launch

        def launch(self, *arguments: object, **constants: object) -> None:
            if self.error is not None:
                raise self.error

    works_on, cpu = symmetric_products.works_on, torch.device("cpu")
    for error, match in (
        (RuntimeError("no compiler"), "RuntimeError: no compiler"),
        (None, "other numbers than torch"),
    ):
        works_on.cache_clear()
        with patch.object(symmetric_products, "symmetric_product_kernel", Failing(error)):
            with pytest.warns(UserWarning, match=match):
                assert not works_on(cpu)
            assert not works_on(cpu)  # it warns once
    works_on.cache_clear()
    assert works_on(cpu)


@pytest.mark.slow
@needs_triton
def test_the_kernel_is_built_for_gpus() -> None:
    """Without a GPU: for tensor cores, in the shared memory that small GPUs have too."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/support/built_products.py")]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    found = [line.split() for line in built.stdout.splitlines()]
    assert [words[:2] for words in found] == [["80", "True"], ["90", "True"]]
    assert all(int(words[2]) <= 99 << 10 for words in found)


STEP = """
import sys, torch
from fsdp_overlap.optim import Muon
print("triton" in sys.modules)
weight = torch.nn.Parameter(torch.randn(2100, 2100))
weight.grad = torch.ones_like(weight)
Muon([weight], ns_steps=1).step()  # in which torch may import Triton
print("fsdp_overlap.optim.symmetric_products" in sys.modules)
"""


def test_the_kernel_is_imported_neither_early_nor_on_a_cpu() -> None:
    shown = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]


# On the emulated device


def train() -> None:
    Program(device="cuda", optimizer=Muon, layout=TensorAtomic()).train(2)


# What the kernel reads, and its results, on a stream that waits for nobody.
ASIDE = "with (m := torch.get_device_module(x.device)).stream(m.Stream()): {}"
DEFECTS = [
    Defect(newton_schulz, "_advance", line, "", new=ASIDE.format(line))
    for line in (
        "gram = symmetric(x, x.mT)",
        "change = symmetric(gram, gram, gram, beta=b, alpha=c)",
    )
]


@needs_triton
def test_kernels_are_ordered() -> None:
    with counting() as given:
        assert not find_races(train, ranks=4, rank=1)
    assert len(given) > 20


@needs_triton
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.old)
def test_a_kernel_that_nothing_orders_is_found(defect: Defect) -> None:
    with counting(), defect.plant():
        findings = find_races(train, ranks=4, rank=1)
    assert any("symmetric_product_kernel" in str(finding) for finding in findings)
