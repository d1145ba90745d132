"""Bad input gets an error that says what to do, before anything is changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_overlap import FsdpContext, FsdpModule, PerTensor, TensorAtomic, fully_shard
from fsdp_overlap.engine.param import owned_parameters
from fsdp_overlap.layout import ParamSpec
from support.fake_group import run_on_fake_group
from support.ranks import run_ranks
from support.zoo import Model, Tied


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def not_a_module() -> None:
    fully_shard("model", FsdpContext())


def module_list() -> None:
    fully_shard(nn.ModuleList([linear()]), FsdpContext())


def twice() -> None:
    ctx = FsdpContext()
    fully_shard(fully_shard(linear(), ctx), ctx)


def mesh_as_context() -> None:
    fully_shard(linear(), init_device_mesh("cpu", (2,)))


def planned_for_another_mesh() -> None:
    ctx = FsdpContext(init_device_mesh("cpu", (2,)))
    module = linear()
    ctx.plan_layout([module])
    fully_shard(module, ctx, mesh=other_mesh())


def other_mesh() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]


def three_dimensions() -> None:
    FsdpContext(init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("replicate", "shard", "tp")))


def mesh_of_another_device() -> None:
    ctx = FsdpContext(init_device_mesh("cpu", (2,)))
    fully_shard(linear(), ctx, mesh=init_device_mesh("meta", (2,)))


def sharded_by_columns() -> None:
    fully_shard(linear(), shard_placement_fn=lambda parameter: Shard(1))


def sharded_by_what_is_not_there() -> None:
    ctx = FsdpContext(layout=PerTensor())
    fully_shard(linear(), ctx, shard_placement_fn=lambda parameter: Shard(1))


def no_divide_factor() -> None:
    fully_shard(linear(), FsdpContext()).set_gradient_divide_factor(0)


def negative_prefetch() -> None:
    FsdpContext(prefetch=-1)


def integer_reshard() -> None:
    fully_shard(linear(), FsdpContext(), reshard_after_forward=3)


def shared_with_inner_unit() -> None:
    model = Tied()
    fully_shard(model.embedding, FsdpContext())
    fully_shard(model, FsdpContext())


def shared_between_siblings() -> None:
    first, second = linear(), linear()
    second.weight = first.weight
    ctx = FsdpContext()
    fully_shard(first, ctx)
    fully_shard(second, ctx, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def outer_module_first() -> None:
    model = Model()
    fully_shard(model)
    fully_shard(model.layers[1])


def outer_module_before_a_list() -> None:
    model = Model()
    ctx = FsdpContext()
    fully_shard(model, ctx)
    fully_shard([model.layers[1].up, model.head], ctx)


def uninitialized() -> None:
    fully_shard(nn.LazyLinear(3), FsdpContext())


def dtensor() -> None:
    module = linear()
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Replicate()]))
    fully_shard(module, FsdpContext(mesh))


class Quantized(torch.Tensor):
    """As of libraries, but without the methods of the extensions of FSDP2."""


def tensor_subclass() -> None:
    module = linear()
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantized))
    fully_shard(module, FsdpContext())


def not_contiguous() -> None:
    module = linear()
    module.weight = nn.Parameter(torch.zeros(4, 4).t()[:, ::2])
    fully_shard(module, FsdpContext())


def pickled() -> None:
    pickle.dumps(fully_shard(linear(), FsdpContext()))


CASES: dict[Callable[[], None], tuple[type[Exception], str]] = {
    not_a_module: (TypeError, "takes a torch.nn.Module or a list of them, got str"),
    module_list: (ValueError, "ModuleList has no forward to hook; call fully_shard on each"),
    twice: (ValueError, "Linear is a unit already"),
    mesh_as_context: (TypeError, "ctx is a DeviceMesh, not an FsdpContext; pass a mesh as mesh="),
    planned_for_another_mesh: (ValueError, "Linear was planned for another mesh than .*meshes="),
    three_dimensions: (ValueError, r"got 3, .*pass the data-parallel ones, as mesh\['replicate'"),
    mesh_of_another_device: (
        ValueError,
        "is a mesh of meta, the context's of cpu; use one context",
    ),
    sharded_by_columns: (
        ValueError,
        r"'weight' of Linear placed as S.*1\): return None, Shard\(0\) or a Shard",
    ),
    sharded_by_what_is_not_there: (
        ValueError,
        r"parameter 'bias' of Linear placed as S.*1\), and it has 1 dimensions, \(\d+,\)",
    ),
    no_divide_factor: (ValueError, r"set_gradient_divide_factor\(0\): use a positive number"),
    negative_prefetch: (ValueError, "prefetch=-1 is not a number of all-gathers; use 0 or more"),
    integer_reshard: (
        ValueError,
        "reshard_after_forward=3: use True, False, None or a divisor of 2, the number of ranks",
    ),
    shared_with_inner_unit: (
        ValueError,
        "'head.weight' of Tied is also 'weight' of the unit Embedding, which has another "
        "FsdpContext: give both the same; or make one unit",
    ),
    outer_module_first: (
        ValueError,
        "'norm.weight' of Block was sharded already, as 'layers.1.norm.weight' of the unit Model "
        "around it: call fully_shard on inner modules first",
    ),
    outer_module_before_a_list: (ValueError, "'0.weight' of .* call fully_shard on inner modules"),
    shared_between_siblings: (
        ValueError,
        "'weight' of Linear is also 'weight' of the unit Linear, which computes with it in "
        "torch.float32, and this unit in torch.bfloat16: give both the same param_dtype; or make "
        r"one unit of the modules that share it, by fully_shard\(\[a, b\], ctx\), or",
    ),
    uninitialized: (ValueError, "not initialized; run a forward before"),
    dtensor: (ValueError, "'weight' of Linear is a DTensor over .* make one mesh"),
    tensor_subclass: (
        TypeError,
        "'weight' of Linear is a Quantized without fsdp_pre_all_gather and fsdp_post_all_gather; ",
    ),
    not_contiguous: (ValueError, r"not contiguous \(shape \(4, 2\), strides \(1, 8\)\)"),
    pickled: (TypeError, r"FSDPLinear cannot be pickled: save its state_dict\(\)"),
}


def expect(case: Callable[[], None]) -> None:
    kind, match = CASES[case]
    with pytest.raises(kind, match=match):
        case()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_is_refused(case: Callable[[], None]) -> None:
    run_on_fake_group(expect, 2, case)


def unchanged() -> None:
    model = Tied()
    parameters = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    ctx = FsdpContext()
    fully_shard(model.embedding, ctx)
    with pytest.raises(ValueError, match="also"):
        fully_shard(model, FsdpContext())
    assert type(model) is Tied
    assert not isinstance(model, FsdpModule)
    assert model.layers[0].up.weight is parameters["layers.0.up.weight"]
    assert torch.equal(model.layers[0].up.weight, values["layers.0.up.weight"])
    assert len(ctx.units) == 1


def test_a_refused_module_is_unchanged() -> None:
    run_on_fake_group(unchanged, 2)


def refused_on_the_second_mesh() -> None:
    """By its layout, which is asked for all before anything is built."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    bad = ["bias"]

    def layout(fqn: str, spec: ParamSpec) -> Any:
        return None if fqn in bad else TensorAtomic()

    model = nn.Linear(4, 4)
    weight, bias = model.weight, model.bias
    ctx = FsdpContext(mesh["a"], layout=layout)

    def place(parameter: nn.Parameter) -> Any:
        info = SimpleNamespace(mesh=mesh["b" if parameter is bias else "a"])
        return SimpleNamespace(mesh_info=info, placement=Shard(0))

    with pytest.raises(TypeError, match="layout of parameter 'bias' is None"):
        fully_shard(model, ctx, shard_placement_fn=place)
    assert type(model) is nn.Linear
    assert model.weight is weight
    assert model.bias is bias
    assert weight.data_ptr()
    assert torch.equal(model(torch.zeros(1, 4))[0], bias)
    units = [model, nn.Linear(4, 4)]
    with pytest.raises(TypeError, match="layout of parameter 'bias' is None"):
        ctx.plan_layout(units[::-1], meshes={units[1]: mesh["b"]})
    with pytest.raises(ValueError, match="got 3"):
        ctx.plan_layout(units, meshes={model: init_device_mesh("cpu", (2, 1, 1))})
    bad.clear()
    ctx.plan_layout(units, meshes={units[1]: mesh["b"]})  # none of them was planned by the first
    fresh = FsdpContext(mesh["a"], layout=layout)
    fresh.plan_layout(units, meshes={units[1]: mesh["b"]})
    plans = []
    for context in (ctx, fresh):
        mesh_info = context.mesh_info_of(mesh["a"])
        plans.append(
            mesh_info.plans.plan_unit([model], [item.spec for item in owned_parameters([model])])
        )
    assert plans[0] == plans[1]  # nor did it leave loads
    fully_shard(model, FsdpContext(mesh["a"], layout=layout), shard_placement_fn=place)


def test_what_is_refused_on_one_mesh_changes_nothing_on_another() -> None:
    run_on_fake_group(refused_on_the_second_mesh, 2)


def test_without_process_groups_the_error_says_how_to_get_them() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        fully_shard(Model(), FsdpContext())


class Returns(nn.Module):
    """Returns what ``make`` makes of its weight and its input."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.weight, x)


class Hiding:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def returns_parameter() -> None:
    for make in (lambda weight, x: weight, lambda weight, x: (x, {"view": weight.t()[1:]})):
        module = fully_shard(Returns(make), FsdpContext())
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), pytest.raises(RuntimeError, match="of its own"):
                module(torch.ones(4))
    module = fully_shard(Returns(lambda weight, x: weight.clone()), FsdpContext())
    assert module(torch.ones(4)).sum() == 16


def test_a_unit_must_not_return_its_parameters() -> None:
    run_ranks(returns_parameter, 2)
