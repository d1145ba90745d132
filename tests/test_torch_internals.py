"""Tests that what ``torch_internals`` names is in torch and does what the library needs."""

from __future__ import annotations

import ast
import copy
import inspect
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed import fsdp
from torch.distributed._composable import _get_registry, replicate
from torch.distributed.checkpoint import (
    FileSystemWriter,
    HuggingFaceStorageWriter,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import optimizer
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the backend)
from torch.utils import _foreach_utils, _pytree
from torch.utils.checkpoint import checkpoint

from fsdp_overlap import torch_internals as internals
from fsdp_overlap.engine import hooks, param
from support.canaries import (
    FILE,
    PACKAGE,
    TOOLS,
    Asked,
    Canaries,
    Operations,
    calls_within,
    in_a_hook,
    internals_in,
    names_of,
    one_rank,
    private_names,
    unused,
)

CANARIES = Canaries()
canary = CANARIES.of


# The autograd engine


@canary("current_graph_task_id")
def tasks_have_numbers() -> None:
    """The schedule does not know in which backward it is."""
    assert internals.current_graph_task_id() == -1
    assert in_a_hook(lambda _: internals.current_graph_task_id()) >= 0


@canary("current_graph_task_keeps_graph")
def a_kept_graph_is_known() -> None:
    """What a kept graph reads is freed."""
    output = torch.ones(1, requires_grad=True) * 2
    seen: list[bool] = []
    output.register_hook(lambda _: seen.append(internals.current_graph_task_keeps_graph()))
    output.backward(retain_graph=True)
    output.backward()
    assert seen == [True, False]


@canary("current_autograd_node")
def the_running_node_is_known() -> None:
    """A backward for given inputs is taken for one for all leaves."""
    node = in_a_hook(lambda _: internals.current_autograd_node())
    assert "MulBackward" in node.name()
    assert [behind.name() for behind, _ in node.next_functions if behind is not None] == [
        "torch::autograd::AccumulateGrad"
    ]


@canary("will_engine_execute_node")
def nodes_to_come_are_known() -> None:
    """Gradients that are not to come are waited for."""

    def look(leaf: torch.Tensor) -> tuple[bool, bool]:
        with torch.enable_grad():
            views: list[Any] = [t.view_as(t) for t in (leaf, torch.ones(1, requires_grad=True))]
        mine, others = (view.grad_fn.next_functions[0][0] for view in views)
        return internals.will_engine_execute_node(mine), internals.will_engine_execute_node(others)

    assert in_a_hook(look) == (True, False)
    node: Any = torch.ones(1, requires_grad=True).sum().grad_fn
    with pytest.raises(RuntimeError):
        internals.will_engine_execute_node(node)


@canary("is_checkpoint_valid")
def backwards_for_given_inputs_are_told_apart() -> None:
    """autograd.grad() is taken for backward(), and frees what is still needed."""
    assert in_a_hook(lambda _: internals.is_checkpoint_valid()) is True
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    output = leaf * 2
    output.register_hook(lambda _: seen.append(internals.is_checkpoint_valid()))
    torch.autograd.grad(output.sum(), leaf)
    assert seen == [False]


@canary("current_sequence_number")
def nodes_are_numbered() -> None:
    """Where ranks agree on what runs, a unit that runs again is taken for a later forward."""
    before = internals.current_sequence_number()
    within: list[int] = []
    in_a_hook(lambda _: within.append(internals.current_sequence_number()))
    assert before <= within[0] < internals.current_sequence_number()


@canary("checkpoint_code")
def checkpoints_have_a_frame() -> None:
    """Where ranks agree on what runs, checkpoints around several units raise."""
    found = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        found.append(hooks.checkpoint())
        return x.exp()

    for use_reentrant in (False, True):
        checkpoint(forward, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)
    assert hooks.checkpoint() is None
    assert found[0] is not None
    assert found[1] is not found[0]


@canary("queue_callback")
def the_engine_calls_back() -> None:
    """Nothing ends a backward: no gradient is waited for or given."""
    called = []
    in_a_hook(lambda leaf: internals.queue_callback(lambda: called.append(leaf.grad is not None)))
    assert called == [True]


@canary("top_saved_tensors_default_hooks")
def who_handles_saved_tensors_is_known() -> None:
    """set_unshard_in_backward(False) gets into the way of checkpointing."""
    assert internals.top_saved_tensors_default_hooks(True) is None
    pack, unpack = operator.pos, operator.neg
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert internals.top_saved_tensors_default_hooks(True) == (pack, unpack)


@canary("are_saved_tensors_hooks_enabled", "push_saved_tensors_hooks", "pop_saved_tensors_hooks")
def whether_saved_tensors_may_be_handled_is_known() -> None:
    """A unit within a transform of torch.func fails with torch's error about hooks."""
    assert internals.are_saved_tensors_hooks_enabled()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not internals.are_saved_tensors_hooks_enabled()
    internals.push_saved_tensors_hooks(operator.pos, operator.neg)
    assert internals.top_saved_tensors_default_hooks(True) == (operator.pos, operator.neg)
    internals.pop_saved_tensors_hooks()
    assert internals.top_saved_tensors_default_hooks(True) is None


@canary("intercept_pushed_hooks")
def hooks_of_others_are_seen_when_they_are_pushed() -> None:
    """What such hooks hold within a unit's forward is read when it is freed, silently."""
    pushed = []
    internals.intercept_pushed_hooks(
        lambda *hooks: (pushed.append(hooks), internals.push_saved_tensors_hooks(*hooks))[0]
    )
    with torch.autograd.graph.saved_tensors_hooks(operator.pos, operator.neg):
        assert internals.top_saved_tensors_default_hooks(True) == (operator.pos, operator.neg)
    internals.intercept_pushed_hooks(None)
    with torch.autograd.graph.saved_tensors_hooks(operator.neg, operator.pos):
        assert pushed == [(operator.pos, operator.neg)]


@canary("set_versions")
def versions_can_be_set() -> None:
    """Backward reads freed parameters, silently."""
    weight = nn.Parameter(torch.ones(2, 2))
    loss = (torch.ones(2, 2, requires_grad=True) * weight.t()).sum()
    internals.set_versions((weight,), (2**31,))
    with pytest.raises(RuntimeError, match="is at version 2147483648; expected version 0"):
        loss.backward(retain_graph=True)
    internals.set_versions((weight,), (0,))
    loss.backward()


@canary("are_functorch_transforms_active")
def transforms_are_known() -> None:
    """torch.func around a unit gives wrong gradients instead of an error."""
    seen = []

    def look(value: torch.Tensor) -> torch.Tensor:
        seen.append(internals.are_functorch_transforms_active())
        return value.sum()

    look(torch.ones(1))
    torch.func.grad(look)(torch.ones(1))
    assert seen == [False, True]


@canary("active_fake_mode")
def modes_without_values_are_known() -> None:
    """A recording reads values that are not there, which raises in the program."""
    assert internals.active_fake_mode() is None
    with FakeTensorMode() as mode:
        assert internals.active_fake_mode() is mode


@canary("profiler_enabled")
def a_running_profiler_is_known() -> None:
    """Traces have no names of ours, or every step pays for them."""
    assert not internals.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert internals.profiler_enabled()


# Tensor subclasses and modes


@canary("keep_version")
def edits_can_be_kept_from_autograd() -> None:
    """Gathering again what a tensor extension has made makes backward fail."""
    tensor = torch.ones(1)
    with internals.keep_version(tensor):
        tensor.add_(1)
    assert (tensor.item(), tensor._version) == (2, 0)


@canary("DisableTorchFunctionSubclass")
def subclasses_can_be_passed_by() -> None:
    """Sharded tensors ask themselves for ever."""
    assert calls_within(internals.DisableTorchFunctionSubclass()) == (0, 1)


@canary("TorchDispatchMode", "OpOverload._schema")
def operations_are_seen() -> None:
    """check_parameters() sees no operations, or not what they write."""
    with Operations() as operations:
        torch.ones(1).add_(1)
    assert [func.overloadpacket.__name__ for func, _ in operations.seen] == ["ones", "add_"]
    func, _ = operations.seen[1]
    writes = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    assert (func._schema.name, writes) == ("aten::add_", [True, False, False])
    assert [a.name for a in func._schema.arguments] == ["self", "other", "alpha"]


@canary("dispatch_mode_count", "without_inner_modes")
def inner_modes_are_set_aside() -> None:
    """A recording's operations are saved by selective checkpoints, in place of the model's."""
    with Operations() as outer:
        count = internals.dispatch_mode_count()
        with Operations() as inner:
            with internals.without_inner_modes(count):
                torch.ones(1)
            torch.zeros(1)
    assert [func.overloadpacket.__name__ for func, _ in inner.seen] == ["zeros"]
    assert [func.overloadpacket.__name__ for func, _ in outer.seen] == ["ones", "zeros"]


class Node:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@canary("SUPPORTED_NODES", "tree_leaves", "tree_map_only")
def nodes_of_trees_are_known() -> None:
    """Tensors in registered classes are not found: their units are not gathered for backward."""
    tensor = torch.ones(1)
    if Node not in internals.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            Node, lambda node: ([node.tensor], None), lambda c, _: Node(*c)
        )
    assert internals.SUPPORTED_NODES[Node].flatten_fn(Node(tensor))[0] == [tensor]
    changed = internals.tree_map_only(torch.Tensor, lambda _: 2, [Node(tensor), {"a": "b"}])
    assert (changed[0].tensor, changed[1]) == (2, {"a": "b"})
    assert internals.tree_leaves([{"a": 1}, Node(tensor), [2]]) == [1, tensor, 2]


# Modules


@canary("ConvNd")
def convolutions_are_known() -> None:
    """Muon steps convolutions as matrices."""
    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "LazyConv2d"):
        assert issubclass(getattr(nn, name), internals.ConvNd)
    assert not issubclass(nn.Linear, internals.ConvNd)


@canary("Module._non_persistent_buffers_set")
def buffers_that_are_not_saved_are_listed() -> None:
    """Exports have buffers that are no weights, or lack some that are."""
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("derived", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"derived"}


@canary("Module._parameters", "Module._buffers", "Module._modules")
def modules_have_tables() -> None:
    """Units cannot change between sharded and unsharded parameters."""
    module, parameter = nn.BatchNorm1d(1), nn.Parameter(torch.ones(1))
    module._parameters["weight"] = parameter
    assert module.weight is parameter
    assert list(module._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert nn.Sequential(module)._modules == {"0": module}


@canary("Module._apply")
def modules_are_moved_through_one_method() -> None:
    """A sharded model is moved or cast without an error, and to_empty() gives it no memory."""
    calls = []

    class Moved(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Moved:
            calls.append(recurse)
            return super()._apply(fn, recurse)

    module = Moved(1, 1)
    module.to(torch.float64)
    module.half()
    module.to_empty(device="meta", recurse=False)
    assert calls == [True, True, False]


@canary(
    "Module._forward_hooks",
    "Module._forward_hooks_with_kwargs",
    "Module._forward_hooks_always_called",
    "Module._forward_pre_hooks",
    "Module._forward_pre_hooks_with_kwargs",
    "Module._load_state_dict_post_hooks",
)
def modules_note_their_hooks() -> None:
    """A copied model has the hooks of its original."""
    module = nn.Linear(1, 1)
    before = module.register_forward_pre_hook(print, with_kwargs=True)
    after = module.register_forward_hook(print, with_kwargs=True, always_call=True)
    loaded = module.register_load_state_dict_post_hook(print)
    assert module._forward_pre_hooks == {before.id: print}
    assert module._forward_hooks == {after.id: print}
    assert module._load_state_dict_post_hooks == {loaded.id: print}
    assert list(module._forward_pre_hooks_with_kwargs) == [before.id]
    assert list(module._forward_hooks_with_kwargs) == [after.id]
    assert list(module._forward_hooks_always_called) == [after.id]


# Kernels and memory


@canary("fused_adamw_")
def adamw_has_a_kernel() -> None:
    """AdamW and Muon cannot step."""
    parameter, gradient, step = torch.ones(3), torch.ones(3), torch.tensor(1.0)
    moments = [torch.zeros(3)], [torch.zeros(3)]
    options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 0.0, "lr": 0.5}
    flags = {"amsgrad": False, "maximize": False}
    internals.fused_adamw_([parameter], [gradient], *moments, [], [step], **options, **flags)
    torch.testing.assert_close(parameter, torch.full((3,), 0.5))


@canary("refuse_access", "allow_access")
def addresses_can_be_refused() -> None:
    """Reads of freed memory end the process, also where torch could raise an error."""
    if internals.allow_access is None:
        return
    assert internals.refuse_access is not None
    tensor = torch.ones(1)
    storage = tensor.untyped_storage()
    internals.refuse_access(storage._cdata, "it is freed")
    with pytest.raises(RuntimeError, match="it is freed"):
        tensor.add(1)
    internals.allow_access(storage._cdata)
    assert tensor.add(1) == 2


@canary("allow_foreach")
def classes_can_have_foreach_forms() -> None:
    """Optimizers and clipping go through sharded parameters one by one."""
    lists = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    tensor, cuda = torch.ones(1).as_subclass(Asked), torch.device("cuda")
    with (
        patch.object(optimizer, "_foreach_supported_types", copy.copy(lists[0])),
        patch.object(_foreach_utils, "_foreach_supported_types", copy.copy(lists[1])),
    ):
        assert not _foreach_utils._has_foreach_support([tensor], cuda)
        internals.allow_foreach(Asked)
        assert _foreach_utils._has_foreach_support([tensor], cuda)
        assert Asked in optimizer._foreach_supported_types
    assert DTensor in lists[0]
    assert DTensor in lists[1]


@canary("Tensor._version")
def edits_are_counted() -> None:
    """Stale weights are used, and lost edits are not noticed."""
    tensor = torch.ones(2)
    view = tensor[:1]
    assert (tensor._version, view._version) == (0, 0)
    view.add_(1)
    assert (tensor._version, view._version) == (1, 1)
    tensor.data.add_(1)
    assert tensor._version == 1


@canary("Tensor._base")
def views_know_their_base() -> None:
    """A unit whose output is edited in place is not gathered for backward."""
    tensor = torch.ones(2)
    assert tensor._base is None
    assert tensor[:1]._base is tensor


@canary("UntypedStorage._cdata")
def storages_have_an_identity() -> None:
    """A tensor in freed memory is not found."""
    tensor = torch.ones(2)
    identity, view = tensor.untyped_storage()._cdata, tensor[:1]
    tensor.untyped_storage().resize_(0)
    assert view.untyped_storage()._cdata == identity
    assert torch.ones(2).untyped_storage()._cdata != identity


@canary("Parameter._is_param")
def parameters_of_a_class_are_marked() -> None:
    """The mark of nn.Parameter is copied as if a user had hung it on a parameter."""
    assert vars(nn.Parameter(torch.ones(1).as_subclass(Asked))) == {"_is_param": True}


# torch.compile


@canary("keep_from_compile")
def functions_can_be_kept_from_compile() -> None:
    """torch.compile traces our hooks."""
    seen = []

    def within() -> None:
        seen.append(torch.compiler.is_compiling())

    def kept() -> None:
        within()

    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        kept()
        return tensor + (2 if torch.compiler.is_compiling() else 1)

    internals.keep_from_compile(kept, "to see it")
    torch.compiler.reset()
    try:
        assert torch.compile(compiled, backend="eager")(torch.zeros(1)) == 2
    finally:
        torch.compiler.reset()
    assert seen == [False]


# DTensors


@canary("DTensorSpec", "TensorMeta", "DTensor.__new__", "DTensor._local_tensor", "DTensor._spec")
def dtensors_are_made_of_a_spec() -> None:
    """Sharded tensors cannot be made."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        meta = internals.TensorMeta(torch.Size([2]), (1,), torch.float32)
        spec = internals.DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        local = torch.ones(2)
        tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
        assert tensor._local_tensor is local
        assert tensor._spec is spec
        assert (spec.mesh, spec.placements, spec.tensor_meta) == (mesh, (Shard(0),), meta)
        assert spec.shard_order == internals.DTensorSpec.compute_default_shard_order((Shard(0),))
        assert (tensor.shape, tensor.dtype, tensor.placements) == (*meta[::2], (Shard(0),))


@canary("refuse_tracing")
def functions_of_some_tensors_are_not_compiled() -> None:
    """Compiled steps of optimizers on sharded parameters end in internal errors of dynamo."""

    class Untraced(torch.Tensor):
        __torch_dispatch__ = torch.Tensor.__torch_function__

        @property
        def __tensor_flatten__(self) -> Any:
            internals.refuse_tracing("no")
            raise AttributeError

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def ones(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(2) * x.dim()

    value = torch.ones(2).as_subclass(Untraced)
    assert not hasattr(value, "__tensor_flatten__")
    assert torch.compile(ones, backend=backend)(value).tolist() == [1, 1]
    assert not graphs


@canary("dtensor_handlers", "number_of")
def dtensors_have_handlers_of_operations() -> None:
    """``float()`` of a DTensor of which ranks have parts gives this rank's part."""
    handlers = {internals.number_of: lambda op, args, kwargs: 7.0}
    with one_rank(), patch.dict(internals.dtensor_handlers, handlers):
        mesh = init_device_mesh("cpu", (1,))
        assert float(distribute_tensor(torch.ones(()), mesh, [Replicate()])) == 7.0


@canary("AsyncCollectiveTensor")
def tensors_on_their_way_can_be_waited_for() -> None:
    """The tile of a parameter that is still on its way is not what arrives."""
    tensor = torch.ones(1)
    assert internals.AsyncCollectiveTensor(tensor).elem is tensor
    assert internals.AsyncCollectiveTensor(tensor).wait() is tensor


@canary("StridedShard")
def rows_of_tiles_have_a_placement() -> None:
    """Rows of a tensor that is cut into rows twice, as FSDP2 places them."""
    placement: Any = internals.StridedShard(0, split_factor=2)
    assert (placement.dim, placement.split_factor) == (0, 2)


@canary("Tensor._backward_hooks")
def hooks_of_tensors_can_be_called() -> None:
    """Users' hooks on sharded parameters, which autograd does not call."""
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(print)
    assert list(tensor._backward_hooks.values()) == [print]  # type: ignore[union-attr]


@canary("Tensor._post_accumulate_grad_hooks")
def hooks_of_gradients_can_be_called() -> None:
    """Users' hooks on sharded parameters, whose gradients autograd does not accumulate."""
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(print)
    assert list(tensor._post_accumulate_grad_hooks.values()) == [print]  # type: ignore[attr-defined]


@canary("DeviceMesh._concatenate", "DeviceMesh._flatten")
def meshes_can_be_put_together() -> None:
    """Tensor parallelism and divided copies have no mesh."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        assert type(mesh)._concatenate([mesh["dp"], mesh["tp"]]).mesh_dim_names == ("dp", "tp")
        assert mesh._flatten().ndim == 1


# Process groups


@canary("older_fsdp2")
def fsdp2_has_older_names() -> None:
    """patch_fsdp2() leaves names of torch's in their place."""
    assert all(older.fully_shard is fsdp.fully_shard for older in internals.older_fsdp2)


@canary("composable_registry_key", "ComposableRegistryItem")
def composable_calls_look_for_each_other() -> None:
    """replicate() around a unit takes the unit's parameters, and trains them wrong. Or a unit takes
    those of a module within it that replicate() trains."""
    module = nn.Linear(1, 1)
    key, item = internals.composable_registry_key, internals.ComposableRegistryItem()
    module.__dict__[key] = {"fully_shard": item}
    assert _get_registry(module) == {"fully_shard": item}
    module = nn.Linear(1, 1)
    assert not param.is_replicated(module)
    with one_rank("gloo"):
        replicate(module)
    assert param.is_replicated(module)
    assert type(module.__dict__[key]["replicate"]) is type(item)


@canary("given_grad_dtype", "tells_given_grad_dtype")
def a_grad_dtype_that_was_set_is_known() -> None:
    """Gradients of parameters with a grad_dtype have the parameters' own dtype."""
    parameter = nn.Parameter(torch.ones(1))
    assert internals.given_grad_dtype(parameter) is None
    parameter.grad_dtype = torch.bfloat16
    assert internals.given_grad_dtype(parameter) is torch.bfloat16
    parameter.grad_dtype = torch.float32
    tells = internals.tells_given_grad_dtype
    assert tells == hasattr(parameter, "_has_grad_dtype_override")
    assert internals.given_grad_dtype(parameter) is (torch.float32 if tells else None)


@canary("AllGather", "ReduceScatter")
def custom_collectives_have_an_interface() -> None:
    """set_custom_all_gather() calls a user's object otherwise than FSDP2 does."""
    sent = ["self", "output_tensor", "input_tensor", "group"]
    for interface, arguments in (
        (internals.AllGather, [*sent, "async_op"]),
        (internals.ReduceScatter, [*sent, "op", "async_op"]),
    ):
        assert list(inspect.signature(interface.__call__).parameters) == arguments
        allocated = inspect.signature(interface.allocate).parameters
        assert list(allocated) == ["self", "size", "dtype", "device"]


@canary("symmetric_memory")
def symmetric_memory_has_a_pool_and_is_registered() -> None:
    """set_symm_mem_for_comm() refuses what torch has, or calls what it has not."""
    module = internals.symmetric_memory
    for function, arguments in (
        (module.get_backend, ["device"]),
        (module.set_backend, ["name"]),
        (module.get_mem_pool, ["device"]),
        (module.rendezvous, ["tensor", "group"]),
    ):
        assert list(inspect.signature(function).parameters) == arguments
    assert module.get_backend(torch.device("cpu")) is None
    with pytest.raises(RuntimeError):
        module.get_mem_pool(torch.device("cpu"))


@canary("FileSystemWriter._write_data")
def every_writer_of_files_calls_one_method() -> None:
    """A file of safetensors would keep one chunk of a name, as torch's writer does by itself."""
    parameters = inspect.signature(FileSystemWriter._write_data).parameters
    assert list(parameters) == ["self", "planner", "file_queue"]
    assert "super()._write_data(planner, file_queue)" in inspect.getsource(HuggingFaceStorageWriter)


@canary("AllgatherOptions", "ProcessGroup._allgather_base", "ProcessGroup._reduce_scatter_base")
def groups_have_methods_for_flat_tensors() -> None:
    """Nothing is gathered or reduced over NCCL."""
    source, target, twice = torch.ones(2), torch.zeros(2), torch.full((2,), 2.0)
    with one_rank("gloo"):
        group = dist.group.WORLD
        options: Any = internals.AllgatherOptions(), dist.ReduceScatterOptions()
        for each in options:
            each.asyncOp = False
        group._allgather_base(target, source, options[0]).wait()
        assert target.tolist() == [1, 1]
        options[1].reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        group._reduce_scatter_base(target, twice, options[1]).wait()
        assert target.tolist() == [2, 2]


@canary("default_group", "default_store", "default_timeout")
def the_default_group_is_known() -> None:
    """Groups of our own cannot be made, and ranks tell each other nothing."""
    with one_rank():
        assert internals.default_group() is dist.group.WORLD
        store: Any = internals.default_store()
        assert store is internals.default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert isinstance(store, dist.HashStore)
        assert isinstance(internals.default_timeout(dist.Backend("gloo")), timedelta)
    with pytest.raises(ValueError, match="not been initialized"):
        internals.default_group()


@canary("make_group", "is_registered")
def groups_are_made_by_their_members() -> None:
    """Contexts have no groups of their own, or destroy_process_group() does not end them."""
    with one_rank("gloo"):
        group = internals.make_group(
            "ours_0_0", [0], dist.Backend("gloo"), None, timedelta(seconds=7)
        )
        assert (group.group_name, group.group_desc) == ("ours_0_0", "ours")
        assert dist.get_process_group_ranks(group) == [0]
        assert dist.get_backend_config(group).startswith("cpu:gloo")
        assert internals.is_registered(group)
        dist.destroy_process_group(group)
        assert not internals.is_registered(group)
    nccl = getattr(dist, "ProcessGroupNCCL", None)  # in builds for GPUs
    if nccl is not None:
        options = nccl.Options()
        options.split_from, options.split_color = None, 0


@canary("is_split_by_options")
def some_backends_are_not_split_by_options() -> None:
    """fully_shard() raises where groups are split, or communicators are made anew in place of
    split."""
    assert internals.is_split_by_options(object())
    one, other = (getattr(dist, f"ProcessGroupNCCL{end}", None) for end in ("", "2"))
    if one is None or other is None:  # not in builds for CPUs
        return
    assert internals.is_split_by_options(one.__new__(one))
    assert not internals.is_split_by_options(other.__new__(other))
    assert one.Options is other.Options
    with pytest.raises(TypeError, match="incompatible function arguments"):
        one.Options().split_from = object()


@canary("let_go_of_groups")
def meshes_forget_their_groups() -> None:
    """A thread of gloo outlives Python, and the process is aborted at its end."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        assert mesh._pg_registry
        internals.let_go_of_groups(mesh)
        assert not mesh._pg_registry


@canary("unwrapped")
def a_wrapper_holds_its_backend() -> None:
    """Communicators are not split, memory is not registered and faults abort nothing under
    TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    debug_level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with one_rank("gloo"):
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert type(backend) is not dist.ProcessGroupGloo
            assert type(internals.unwrapped(backend)) is dist.ProcessGroupGloo
    finally:
        dist.set_debug_level(debug_level)


@canary(
    "ProcessGroup._get_backend", "ProcessGroup._get_sequence_number_for_group", "Options._timeout"
)
def groups_have_a_backend_that_counts() -> None:
    """Groups of our own are not as the user's, and are not used again."""
    tensor = torch.ones(1)
    with one_rank("gloo"):
        group = internals.make_group(
            "ours_0_0", [0], dist.Backend("gloo"), None, timedelta(seconds=7)
        )
        backend = group._get_backend(torch.device("cpu"))
        assert backend.name().lower() == "gloo"
        assert backend.options._timeout == timedelta(seconds=7)
        issued = group._get_sequence_number_for_group()
        dist.all_reduce(tensor, group=group)
        assert group._get_sequence_number_for_group() == issued + 1


# Checkpoints


@canary("StorageInfo")
def entries_lie_in_files() -> None:
    """Checkpoints cannot be read."""
    info = internals.StorageInfo("file", 1, 2)
    assert (info.relative_path, info.offset, info.length) == ("file", 1, 2)


@canary("DistWrapper")
def a_save_makes_what_sends_objects_first() -> None:
    """Without numpy, ranks wait for one that failed."""
    assert internals.DistWrapper(None, False, 0).use_dist is False
    for verb in (state_dict_saver._save_state_dict, state_dict_loader._load_state_dict):
        source = inspect.getsource(verb)
        assert source.index("_DistWrapper(") < source.index("distW.")


@canary("patch_state_dicts")
def whole_tensors_are_cut_by_two_functions() -> None:
    """set_model_state_dict() with full_state_dict does not know sharded parameters."""
    calls = []

    def seeing(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return function(*args, **kwargs)

            return call

        return around

    names = ("distribute_tensor", "_distribute_tensors")
    as_it_was = {name: getattr(state_dict_utils, name) for name in names}
    with one_rank(), patch.multiple(state_dict_utils, **as_it_was):
        internals.patch_state_dicts(*map(seeing, names))
        model, whole = nn.Linear(2, 2, bias=False), torch.ones(2, 2)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
        for is_broadcast in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_broadcast)
            set_model_state_dict(model, {"weight": whole}, options=options)
    assert calls == list(names)


# FSDP2


@canary("patch_fully_shard_state", "FSDPModule._get_fsdp_state")
def fsdp2_is_asked_for_states_in_two_ways() -> None:
    """torch.distributed.pipelining reads FSDP2's state of our modules and finds none."""
    module, other, found = nn.Linear(2, 2), nn.Linear(2, 2), object()
    with patch.object(fsdp.fully_shard, "state", fsdp.fully_shard.state):
        internals.patch_fully_shard_state({module: found}.get)
        assert fsdp.fully_shard.state(module) is found
        assert fsdp.fully_shard.state(other) is None
    verbs = [getattr(fsdp.FSDPModule, name) for name in ("unshard", "set_requires_gradient_sync")]
    assert all("_get_fsdp_state" in verb.__code__.co_names for verb in verbs)


@canary("FSDPState._state_ctx", "FSDPState._comm_ctx")
@canary("FSDPState._root_post_backward_final_callback")
def states_have_what_pipelines_ask() -> None:
    """Stages of torch.distributed.pipelining ask for something else at the end of a step."""
    with one_rank():
        state = fsdp.fully_shard.state(fsdp.fully_shard(nn.Linear(2, 2)))
    assert list(state._state_ctx.all_states) == []  # before the first forward
    assert state._comm_ctx is not None
    assert callable(state._root_post_backward_final_callback)


# A device type of Python


@pytest.mark.parametrize("name", CANARIES.checks)
def test_torch_has(name: str) -> None:
    CANARIES.run(name)


def test_every_name_has_a_canary() -> None:
    assert set(CANARIES.checks) == names_of(internals)


def test_only_one_file_uses_what_torch_does_not_promise() -> None:
    files = [
        path for path in PACKAGE.rglob("*.py") if path.name != FILE and TOOLS not in path.parents
    ]
    found = internals_in(files, internals.ATTRIBUTES)
    assert found == [], f"give it a name in {FILE}, or list it in ATTRIBUTES"


def test_what_is_private_is_found() -> None:
    lines = """
from torch.utils import _pytree
from torch.nn.modules.conv import _ConvNd
import torch._dynamo
import torch.distributed as dist
torch._C._is_tracing()
dist.distributed_c10d.ProcessGroup
mesh._layout
getattr(group, "_rank")
torch._foreach_copy_([], [])
tensor._version
self._mine
""".strip()
    found = [line for line, _ in private_names(ast.parse(lines), {"_mine"}, internals.ATTRIBUTES)]
    assert sorted(set(found)) == [1, 2, 3, 5, 6, 7, 8]


def test_nothing_is_listed_that_nobody_uses() -> None:
    files = [
        path for path in PACKAGE.rglob("*.py") if path.name != FILE and TOOLS not in path.parents
    ]
    assert unused(CANARIES.checks, files) == []
