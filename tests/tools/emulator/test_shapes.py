"""What operations return for tensors without values, remembered, is what torch returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_overlap.tools.emulator import shapes
from fsdp_overlap.tools.emulator.dispatch import tensors_in
from fsdp_overlap.tools.emulator.shapes import run_on_shapes

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(output: Any) -> list[tuple[Any, ...]]:
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.untyped_storage().nbytes())
        for each in tensors_in(output)
    ]


CASES: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "product": lambda: (aten.mm.default, [empty(3, 4), empty(4, 5)]),
    "product of a transpose": lambda: (aten.mm.default, [empty(4, 3).t(), empty(4, 5)]),
    "sum": lambda: (aten.sum.dim_IntList, [empty(3, 4), [1]]),
    "sum that keeps": lambda: (aten.sum.dim_IntList, [empty(3, 4), [1], True]),
    "an integer": lambda: (aten.add.Tensor, [empty(3, dtype=torch.int64), 1]),
    "a float": lambda: (aten.add.Tensor, [empty(3, dtype=torch.int64), 1.0]),
    "a mask": lambda: (aten.add.Tensor, [empty(3, dtype=torch.bool), True]),
    "several": lambda: (aten.native_layer_norm.default, [empty(2, 6), [6], None, None, 1e-5]),
    "a list": lambda: (aten._foreach_mul.Scalar, [[empty(2), empty(3, 3)], 2.0]),
    "attention": lambda: (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        [empty(2, 4, 16, 8)] * 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_remembered_is_what_torch_returns(name: str) -> None:
    shapes._returned.clear()
    for case in (
        *CASES.values(),
        *CASES.values(),
        CASES[name],
    ):  # each must be told from all others
        func, args = case()
        found = run_on_shapes(func, args, {}, tensors_in(args))
        assert looks(found) == looks(func(*args))


def times_asked(func: Any, *args: Any, **kwargs: Any) -> int:
    """How often torch runs ``func`` in three calls."""
    shapes._returned.clear()
    asked = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        return func(*args, **kwargs)

    for _ in range(3):
        run_on_shapes(counted, args, kwargs, tensors_in(args))
    return asked


def test_torch_is_asked_once() -> None:
    assert times_asked(aten.mm.default, empty(3, 4), empty(4, 5)) == 1


def test_what_shares_memory_with_an_argument_is_asked_for_each_time() -> None:
    assert times_asked(aten.view.default, empty(3, 4), [12]) == 3
    assert times_asked(aten.split.Tensor, empty(4), 2) == 3


def test_complex_numbers_are_asked_for_each_time() -> None:
    assert times_asked(aten.mul.Tensor, empty(2, dtype=torch.complex64), 2.0) == 3


def test_an_operation_in_place_returns_its_argument() -> None:
    shapes._returned.clear()
    for _ in range(2):
        target, other = empty(3), empty(3)
        assert run_on_shapes(aten.add_.Tensor, [target, other], {}, [target, other]) is target


def test_an_error_is_raised_each_time() -> None:
    args = [empty(3, 4), empty(5, 6)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"reduction dim|mat1"):
            run_on_shapes(aten.mm.default, args, {}, args)


def test_the_default_dtype_is_part_of_the_question() -> None:
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            args = [empty(3, dtype=torch.int64), 2]
            assert run_on_shapes(aten.div.Tensor, args, {}, args[:1]).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_MOST", 4)
    for size in range(20):
        run_on_shapes(aten.relu.default, [empty(size)], {}, [empty(size)])
        assert len(shapes._returned) <= 4
