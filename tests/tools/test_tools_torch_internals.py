"""Tests that what the tools' ``torch_internals`` names is in torch and does what they need."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import torch_internals as core
from fsdp_overlap.tools import torch_internals as internals
from support.canaries import (
    FILE,
    TOOLS,
    Canaries,
    Mode,
    Operations,
    calls_within,
    internals_in,
    names_of,
    one_rank,
    unused,
)

CANARIES = Canaries()
canary = CANARIES.of


@canary("ProfilerBase")
def profilers_are_told_what_to_record() -> None:
    """The emulated device does not keep profilers from asking for a GPU."""
    assert issubclass(torch.profiler.profile, internals.ProfilerBase)
    assert "activities" in inspect.signature(internals.ProfilerBase.__init__).parameters


@canary("without_transform")
def tensors_within_a_transform_have_one_outside() -> None:
    """Programs that use torch.func do not run on the emulated device."""
    tensor, found = torch.ones(2, 3), []

    def see(part: torch.Tensor) -> torch.Tensor:
        found.append(internals.without_transform(part))
        return part

    torch.func.vmap(see)(tensor)
    assert found[0].shape == tensor.shape


@canary("running_backwards_by")
def backwards_are_seen_around() -> None:
    """The emulated device does not see backwards begin and end."""
    runs = []

    def run(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs.append("begins")
        result = engine(*args, **kwargs)
        runs.append("ends")
        return result

    leaf = torch.ones(1, requires_grad=True)
    with internals.running_backwards_by(run):
        (leaf * 2).sum().backward()
        torch.autograd.grad((leaf * 2).sum(), leaf)
    (leaf * 2).sum().backward()
    assert runs == ["begins", "ends"] * 2


@canary("determinism_checks")
def checkpointing_looks_its_checks_up() -> None:
    """The emulated device does not see what checkpointing reads."""
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    checks = internals.determinism_checks()
    with patch.dict(checks, {"default": lambda tensor: seen.append(tensor)}):
        checkpoint(torch.sin, leaf, use_reentrant=False).sum().backward()
    assert seen


@canary("DisableTorchFunction")
def modes_can_be_passed_by() -> None:
    """The emulated device sees itself."""
    assert calls_within(internals.DisableTorchFunction()) == (0, 0)


@canary("is_torch_function_enabled")
def it_is_known_whether_subclasses_are_asked() -> None:
    """The emulated device asks classes that torch would not."""
    assert internals.is_torch_function_enabled()
    with torch._C.DisableTorchFunctionSubclass():
        assert not internals.is_torch_function_enabled()


@canary("disabled_torch_function")
def classes_that_are_not_asked_are_known() -> None:
    """The emulated device asks parameters about calls."""
    assert nn.Parameter.__torch_function__ is internals.disabled_torch_function


@canary("parse_to")
def the_arguments_of_to_are_understood() -> None:
    """Tensors cannot be moved to the emulated device."""
    parsed = internals.parse_to("cpu", torch.float64, non_blocking=True)
    assert parsed == (torch.device("cpu"), torch.float64, True, None)


@canary("disable_current_modes")
def no_operation_is_seen_where_modes_are_disabled() -> None:
    """The emulated device takes copies of storages for operations."""
    with Operations() as operations, internals.disable_current_modes():
        torch.ones(1)
    assert operations.seen == []


@canary("get_current_function_mode_stack")
def modes_know_whether_they_are_active() -> None:
    """The emulated device misses what runs within a call, or sees it twice."""
    with Mode() as mode:
        assert mode in internals.get_current_function_mode_stack()
        torch.ones(1)
    assert not mode.is_on_its_own_stack


@canary(
    "get_current_dispatch_mode_stack",
    "push_dispatch_mode",
    "pop_dispatch_mode",
    "push_function_mode",
    "pop_function_mode",
)
def another_thread_takes_modes_over() -> None:
    """The emulated device misses what backward does on a thread of its own, or ends there."""
    seen = []

    def work() -> None:
        internals.push_dispatch_mode(operations)
        internals.push_function_mode(calls)
        torch.sin(torch.ones(1))
        seen.append(internals.get_current_dispatch_mode_stack())
        internals.pop_function_mode()
        internals.pop_dispatch_mode()
        seen.append(internals.get_current_dispatch_mode_stack())

    with Operations() as operations, Mode() as calls:
        pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(func) for func, _ in operations.seen] == ["aten.ones.default", "aten.sin.default"]
    assert calls.calls == 2
    assert seen == [[operations], []]


@canary("is_torch_function_all_disabled")
def calls_that_no_mode_sees_are_known() -> None:
    """A backward on a thread of its own sees calls that its caller has hidden, or hides them."""
    assert not internals.is_torch_function_all_disabled()
    with core.DisableTorchFunctionSubclass():
        assert not internals.is_torch_function_all_disabled()
    with internals.DisableTorchFunction():
        assert internals.is_torch_function_all_disabled()


@canary("FakeTensorMode")
def what_was_learned_without_memory_can_be_forgotten() -> None:
    """The emulated device of another number makes torch forget it."""
    mode = internals.FakeTensorMode
    with mode():
        torch.ones(1) + 1
    assert mode.cache_info().size
    mode.cache_clear()
    assert not mode.cache_info().size


@canary("FakeTensor")
def tensors_without_memory_are_known() -> None:
    """The emulated device gives fake tensors memory."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert type(torch.ones(1)) is internals.FakeTensor


@canary("flash_attention")
def attention_of_gpus_has_shapes() -> None:
    """The emulated device without values cannot run models with attention."""
    query = torch.empty(1, 4, 8, 16, device="meta", requires_grad=True)
    key = torch.empty(1, 2, 8, 16, device="meta")
    output = internals.flash_attention(query, key, key, 0.0, True, scale=None)[0]
    output.sum().backward()
    assert output.shape == query.shape
    assert query.grad is not None


@canary("masked_attention")
def attention_with_a_mask_has_shapes() -> None:
    """The emulated device without values computes all scores of models with sliding windows."""
    query = torch.empty(1, 4, 8, 16, device="meta", requires_grad=True)
    bias = torch.empty(1, 1, 8, 8, device="meta").expand(1, 4, 8, 8)
    output = internals.masked_attention(query, query, query, bias, True, 0.0, scale=None)[0]
    output.sum().backward()
    assert output.shape == query.shape
    assert query.grad is not None


@canary("push_pending_hooks")
def others_see_hooks_being_pushed() -> None:
    """Hooks of saved tensors see tensors of the emulated device as the host's."""
    pushed = []
    core.intercept_pushed_hooks(lambda *hooks: pushed.append(hooks))
    try:
        internals.push_pending_hooks(bool, float)
    finally:
        core.intercept_pushed_hooks(None)
    assert pushed == [(bool, float)]


@canary("attention_on_host")
def the_host_has_attention_of_its_own() -> None:
    """Programs with context or tensor parallelism cannot run on the emulated GPU."""
    query = torch.rand(1, 4, 8, 16, requires_grad=True)
    forward, backward = internals.attention_on_host
    output, logsumexp = forward(query, query, query, 0.0, True)
    gradients = backward(output, query, query, query, output, logsumexp, 0.0, True)
    assert [gradient.shape for gradient in gradients] == [query.shape] * 3


@canary("DTensor._op_dispatcher")
def dtensors_ask_a_propagator_how_results_lie() -> None:
    """What DTensors try out on the emulated device takes time and memory there."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagate = propagator.propagate_op_sharding_non_cached
    with (
        one_rank(),
        patch.object(
            propagator, "propagate_op_sharding_non_cached", side_effect=propagate
        ) as asked,
    ):
        mesh = init_device_mesh("cpu", (1,))
        distribute_tensor(torch.ones(3, 17, 5), mesh, [Replicate()]).sum(1)
    assert asked.called


@canary("name_of_group", "group_named")
def groups_have_the_names_that_torch_gave_them() -> None:
    """Ranks in name only are not found by the meshes that hold them."""
    with one_rank("gloo"):
        group = dist.new_group()
        assert internals.name_of_group(group) == group.group_name
        assert internals.group_named(group.group_name) is group


@canary("ScriptObject._type")
def groups_are_found_among_arguments() -> None:
    """The emulated device takes collectives for operations."""
    with one_rank(), Operations() as operations:
        dist.all_reduce(torch.ones(1))
    [found] = [
        value
        for _, args in operations.seen
        for value in args
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
    ]
    assert dist.ProcessGroup.unbox(found).size() == 1


@canary("default_device", "takes_default_device")
def makers_of_tensors_have_a_default_device() -> None:
    """Tensors of the emulated device would lie elsewhere."""
    assert internals.default_device.CURRENT_DEVICE is None
    torch.set_default_device("meta")
    assert torch.device("meta") == internals.default_device.CURRENT_DEVICE
    torch.set_default_device(None)
    assert {torch.zeros, torch.tensor} <= internals.takes_default_device()
    assert torch.zeros_like not in internals.takes_default_device()


@canary("group_tensors", "replacing_group_tensors")
def optimizers_group_tensors() -> None:
    """Optimizers take tensors on the emulated device for the host's."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    seen: list[Any] = []

    def group(lists: list[list[Any]], with_indices: bool = False) -> Any:
        seen.append(lists)
        return internals.group_tensors(lists, with_indices)

    with internals.replacing_group_tensors(group):
        torch.optim.SGD([parameter], foreach=True).step()
    assert seen
    [((device, dtype), (lists, indices))] = internals.group_tensors([[parameter]], True).items()
    assert (device.type, dtype, len(lists), indices) == ("cpu", torch.float32, 1, [0])


@canary("wrapping_on")
def wrappers_lie_where_they_are_made_to() -> None:
    """Wrappers on the emulated device lie now there, now below, and torch refuses to mix them."""

    class Wrapper(torch.Tensor):
        __torch_dispatch__ = torch.Tensor.__torch_function__

    make: Any = torch.Tensor
    with internals.wrapping_on("meta", ("cuda",)):
        devices = [
            make._make_wrapper_subclass(Wrapper, (2,), device=device).device.type
            for device in ("cuda", "cpu")
        ]
    assert devices == ["meta", "cpu"]


@canary("moving_random_states_by")
def dtensors_move_random_states() -> None:
    """Random operations on DTensors fail on the emulated device."""
    seen: list[str] = []

    def call(method: Callable[..., Any], *args: Any) -> Any:
        seen.append(method.__name__)
        return method(*args)

    states = SimpleNamespace(_device=torch.device("cpu"), _device_handle=torch.random)
    with internals.moving_random_states_by(call):
        tracker = internals._random.OffsetBasedRNGTracker
        tracker._set_device_state(states, tracker._get_device_state(states))
        internals._random._PhiloxState(torch.zeros(16, dtype=torch.uint8))
    assert seen == ["_get_device_state", "_set_device_state", "__init__"]


@canary("patch_raw_stream")
def libraries_ask_for_raw_streams() -> None:
    """Programs that import bitsandbytes fail on the emulated GPU."""
    with internals.patch_raw_stream(lambda index: 7 + index):
        assert torch._C._cuda_getCurrentRawStream(1) == 8


@canary("shaping_dtensors_on_host")
def dtensors_are_shaped_on_host() -> None:
    """DTensors on the emulated GPU cannot be initialized in place."""
    with one_rank():
        tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
        with internals.shaping_dtensors_on_host(), internals.FakeTensorMode():
            fake = internals._op_schema._rebuild_tensor_from_dtensor_meta(tensor._spec)
    assert (fake.device.type, fake.shape) == ("cpu", tensor.shape)


@canary("drawing_without_bounds")
def values_within_bounds_are_drawn_again() -> None:
    """Programs that initialize with trunc_normal_ cannot be predicted."""
    whole = torch.empty(1000)
    with internals.drawing_without_bounds():
        nn.init.trunc_normal_(whole, 0.0, 1.0, -0.5, 0.5)
    assert whole.abs().max() > 0.5


@canary("swap_tensor_impl")
def a_tensor_becomes_another() -> None:
    """Models that are built on the host cannot be moved to a device without values."""
    parameter, other = nn.Parameter(torch.ones(2)), torch.empty(3, device="meta")
    kept = parameter
    internals.swap_tensor_impl(parameter, other)
    assert kept.is_meta
    assert other.tolist() == [1.0, 1.0]


@canary("has_kernel", "run_kernel_of_cuda")
def kernels_for_cuda_can_be_run() -> None:
    """Operators that a library has for CUDA alone cannot be called on the emulated device."""

    @torch.library.custom_op("fsdp_overlap_canary::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    operator = torch.ops.fsdp_overlap_canary.twice.default
    assert internals.has_kernel(operator.name(), "CUDA")
    assert not internals.has_kernel(operator.name(), "CPU")
    assert internals.run_kernel_of_cuda(operator, torch.ones(2)).tolist() == [2, 2]


@canary("patch_accelerator")
def the_accelerator_is_asked_for_in_python() -> None:
    """Programs for GPUs find another device."""
    with internals.patch_accelerator(torch.device("cuda")):
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.get_device_module() is torch.cuda


@canary("names_of_groups")
def groups_have_names() -> None:
    """Groups that behave as NCCL's have no name."""
    with one_rank():
        assert internals.names_of_groups[dist.group.WORLD] == "0"


@canary("register_device")
def a_device_can_be_of_python() -> None:
    """The emulated device does not exist."""
    from fsdp_overlap.tools.emulator import torch_module

    torch_module.register()
    assert torch.device("emulated", 0).type == "emulated"
    assert getattr(torch, "emulated") is torch_module  # noqa: B009


@canary("HigherOrderOperator", "OpOverload", "OpOverload._can_decompose")
def operators_have_classes() -> None:
    """The emulated device misses operations that functions call, or in inference mode."""
    assert isinstance(torch.ops.aten.add_.Tensor, internals.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, internals.HigherOrderOperator)
    assert not torch.ops.aten.add_.Tensor._can_decompose()
    assert torch.ops.aten.reshape.default._can_decompose()


@pytest.mark.parametrize("name", CANARIES.checks)
def test_torch_has(name: str) -> None:
    CANARIES.run(name)


def test_every_name_has_a_canary() -> None:
    assert set(CANARIES.checks) == names_of(internals)


def test_only_two_files_use_what_torch_does_not_promise() -> None:
    files = [path for path in TOOLS.rglob("*.py") if path.name != FILE]
    found = internals_in(files, core.ATTRIBUTES | internals.ATTRIBUTES)
    assert found == [], f"give it a name in tools/{FILE}, or list it in ATTRIBUTES"


def test_nothing_is_listed_that_the_tools_do_not_use() -> None:
    files = [path for path in TOOLS.rglob("*.py") if path.name != FILE]
    assert unused(CANARIES.checks, files) == []
