"""Private names of torch that the library uses.

No other file names a private module, function or class of torch. If a new release of torch breaks
the library, read here. ``tests/test_torch_internals.py`` has a test for each name, which says what
broke. Everything here was seen on torch 2.11, 2.13 and 2.15, and comments say where these differ.

There are three kinds:

- Private names have a name here, mostly torch's own without the underscore. It stands for torch's
  own object, with no function around it, so that a use costs no Python call.
- What changes torch, or writes into its tables, is a function here.
- Private attributes of torch's objects are used where they are needed, because a function around
  each would be a Python call for every parameter in every step. :data:`ATTRIBUTES` lists them,
  also those that many programs use as if they were public, such as ``module._parameters``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import autograd
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, grad_mode
from torch.distributed import _functional_collectives, _state_dict_utils, _symmetric_memory
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable import fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import utils as checkpoint_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor, _dtensor_spec, placement_types
from torch.nn.modules import conv
from torch.optim import optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree, checkpoint

ATTRIBUTES = {
    # Tensors and their storages
    "Tensor._version": "how often a tensor was edited, which tells stale buffers and lost edits",
    "Tensor._base": "what a view is a view of, whose history an edit of the view changes",
    "UntypedStorage._cdata": "tells storages apart that have no memory, so no address",
    "Tensor._post_accumulate_grad_hooks": "what users want called when a gradient is there",
    "Tensor._backward_hooks": "what users want called with a gradient, before it is accumulated",
    "Parameter._is_param": "written on tensors of our class, as nn.Parameter writes it",
    # DTensors, which sharded tensors are
    "DTensor.__new__": "makes one of the local tensor and the spec, without a check of either",
    "DTensor._local_tensor": "what this rank holds; to_local() is a node of autograd's graph",
    "DTensor._spec": "how a tensor lies over its mesh",
    "DeviceMesh._concatenate": "the mesh of tensor parallelism and of ours, from one root",
    "DeviceMesh._flatten": "the mesh of one dimension over which divided copies are sharded",
    # Modules, whose tables are read without nn.Module's lookups and written without its checks
    "Module._parameters": "changes between sharded and unsharded parameters",
    "Module._buffers": "walked without those of submodules",
    "Module._non_persistent_buffers_set": "which buffers are no weights, and no state",
    "Module._modules": "walked without what they hold",
    "Module._apply": "overridden, to see to_empty() and casts, and to refuse moves",
    "Module._forward_hooks": "without our hooks in a copy that is sharded anew",
    "Module._forward_hooks_with_kwargs": "how each hook is called",
    "Module._forward_hooks_always_called": "how each hook is called",
    "Module._forward_pre_hooks": "without our hooks in a copy that is sharded anew",
    "Module._forward_pre_hooks_with_kwargs": "how each hook is called",
    "Module._load_state_dict_post_hooks": "without our hooks in a copy that is sharded anew",
    # Process groups: torch.distributed's functions around these methods double the host's time
    "ProcessGroup._allgather_base": "gathers into one tensor; 2.11 has no all_gather_single()",
    "ProcessGroup._reduce_scatter_base": "reduces from one; 2.11 has no reduce_scatter_single()",
    "ProcessGroup._get_backend": "gives the backend's name and options",
    "ProcessGroup._get_sequence_number_for_group": "counts the collectives that were issued",
    "Options._timeout": "how long a collective may last, for groups of our own",
    # FSDP2, of whose class our modules are instances too
    "FSDPModule._get_fsdp_state": "overridden, because verbs that are not ours ask it first",
    "FSDPState._state_ctx": "through it pipeline stages of 2.13 find all states, and we have none",
    "FSDPState._comm_ctx": "tells pipeline schedules of 2.15 which stages share comm streams",
    "FSDPState._root_post_backward_final_callback": "ends a step of a pipeline stage of 2.13",
    "FileSystemWriter._write_data": "wrapped, since each file of safetensors has a name once",
    # Operations, as modes see them
    "OpOverload._schema": "tells which arguments an operation writes",
}
"""Private attributes of torch's objects that the library reads, writes or overrides, and why."""

# The autograd engine

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward under way on this thread, -1 if there is none. Backwards that are
nested or follow each other have different numbers."""

current_graph_task_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward under way leaves its graph to later ones."""

current_autograd_node = torch._C._current_autograd_node
"""The node of autograd's graph that is running. It is asked for in hooks of that node."""

will_engine_execute_node = torch._C._will_engine_execute_node
"""Whether the backward under way comes to a node. It raises if it was asked about this one."""

is_checkpoint_valid = Variable._execution_engine.is_checkpoint_valid
"""Whether the backward under way is for all leaves. Reentrant checkpointing asks it for that."""

queue_callback = Variable._execution_engine.queue_callback
"""Has a function called when the backward under way has run. FSDP2 ends its backwards likewise."""

top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that handle what autograd saves now. It must be given true, or it tells of tracing."""

are_saved_tensors_hooks_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
"""Whether saved tensors may be handled, which ``torch.func`` forbids within its transforms; and how
hooks are set aside meanwhile, because it refuses to begin where there are any."""


def intercept_pushed_hooks(push: Callable[..., None] | None) -> None:
    """Have ``push(pack, unpack)`` called where torch or others would push hooks of saved tensors.
    ``None`` ends that."""
    torch._C._autograd._push_saved_tensors_default_hooks = push or push_saved_tensors_hooks


are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is around a forward. All-gathers do not go through it."""

active_fake_mode = torch._guards.active_fake_mode
"""The mode around a forward whose tensors have no values, ``None`` outside of any."""

profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. Spans are named only then."""


def current_sequence_number() -> int:
    """Return the number of the node of autograd's graph that is running, or of the next one that
    this thread makes. Nothing public tells which node of two is the older one."""
    node = current_autograd_node()
    return autograd._get_sequence_nr() if node is None else node._sequence_nr()


checkpoint_code = inspect.unwrap(checkpoint.checkpoint).__code__
"""Whose frames tell activation checkpoints apart. Nothing else tells which units are in one that
is reentrant."""

keep_version = grad_mode._unsafe_preserve_version_counter
"""Within it edits of a tensor are not counted, as those that gather it anew."""

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Sets the version counters of tensors. Autograd refuses to read what it saved at another version,
so it refuses parameters that are not gathered. ``keep_version`` is made of it."""

# Tensor subclasses and modes

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Within it torch's own code runs on a sharded tensor, as torch's guide to subclasses has it."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Shows a mode every operation. It is documented, and only its module is private."""

dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""How many modes of this thread see operations."""


@contextmanager
def without_inner_modes(count: int) -> Iterator[None]:
    """Hide operations from all but the outermost ``count`` modes. Checkpoints that save some
    operations would count a recording's among those of the model."""
    inner = [_python_dispatch._pop_mode() for _ in range(dispatch_mode_count() - count)]
    try:
        yield
    finally:
        for mode in reversed(inner):
            _python_dispatch._push_mode(mode)


SUPPORTED_NODES = _pytree.SUPPORTED_NODES
"""The classes that are nodes of trees, and how to take them apart. Users register more."""

tree_leaves = _pytree.tree_leaves
"""Lists what is in a tree. torch exports it nowhere else, nor the next one."""

tree_map_only = _pytree.tree_map_only
"""Changes all tensors in a tree."""

# Modules

ConvNd = conv._ConvNd
"""The base of all convolutions, which Muon leaves to AdamW. Only classes under it are public."""

# Kernels and memory

fused_adamw_ = torch._fused_adamw_
"""AdamW's kernel over lists of tensors. The optimizer around it takes no runs of them."""

# The first makes a storage raise an error instead of telling its address. The second ends that.
# Builds for a CPU alone have neither. torch 2.11 has only the first, which alone is of no use.
refuse_access = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
allow_access = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let optimizers and clipping choose foreach and fused forms for tensors of this class."""
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if tensor_class not in types:
            types.append(tensor_class)


# torch.compile


def keep_from_compile(function: Callable[..., Any], reason: str) -> None:
    """Make ``torch.compile`` end its graph before ``function`` and run it, and all that it calls,
    as they are. ``torch.compiler.disable()`` would import ``torch._dynamo``, half a second in every
    rank, and put two frames around every call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = reason


def refuse_tracing(reason: str) -> None:
    """Make ``torch.compile``, if it is what asks, run the function that it traces, and all that
    this calls, as they are. With ``fullgraph=True`` the error is the user's."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and torch._guards.TracingContext.try_get() is not None:
        refusal = dynamo.exc.Unsupported(reason)
        skip = eval_frame._FrameAction.SKIP
        refusal.skip_frame = True
        refusal.frame_exec_strategy = eval_frame._FrameExecStrategy(skip, skip)
        raise refusal


# FSDP2

older_fsdp2 = (fsdp, sys.modules[f"{fsdp.__name__}.fully_shard"])
"""FSDP2's first module, and the one that it takes the names from, which are those of today's. It
hides the second behind a function of the same name. ``patching.py`` replaces all three."""


def patch_fully_shard_state(state_of: Callable[[Any], Any]) -> None:
    """Patch FSDP2's ``fully_shard.state(module)`` to ask ``state_of`` first."""
    torchs_fully_shard: Any = fully_shard
    torchs_state_of = torchs_fully_shard.state

    @wraps(torchs_state_of)
    def state(module: Any) -> Any:
        ours = state_of(module)
        return torchs_state_of(module) if ours is None else ours

    torchs_fully_shard.state = state


composable_registry_key = REGISTRY_KEY
ComposableRegistryItem = RegistryItem
"""Where torch's composable functions note on a module that they were called, and look for each
other: ``replicate()`` on a module around a unit leaves its parameters alone then."""

tells_given_grad_dtype = hasattr(torch.Tensor, "_has_grad_dtype_override")
"""Whether a parameter tells if its ``grad_dtype`` was set, as from torch 2.15 on."""


def given_grad_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return what somebody set as the ``grad_dtype`` of ``parameter``. ``None`` if nobody did:
    gradients then have the parameter's dtype, also after a cast. Up to torch 2.14 a parameter does
    not tell whether its own dtype was set, and counts as one that follows casts."""
    if tells_given_grad_dtype:
        is_given: bool = parameter._has_grad_dtype_override  # type: ignore[attr-defined]
    else:
        is_given = parameter.grad_dtype != parameter.dtype
    return parameter.grad_dtype if is_given else None


# DTensors

DTensorSpec = _dtensor_spec.DTensorSpec
"""How a DTensor lies over a mesh. Every sharded tensor is made with one."""

TensorMeta = _dtensor_spec.TensorMeta
"""The shape, stride and dtype of the whole tensor, in a spec."""

StridedShard = placement_types._StridedShard
"""The placement of rows of a tile whose tensor another dimension of the mesh cuts into rows too."""

dtensor_handlers = DTensor._op_dispatcher._custom_op_handlers
"""What runs an operation on DTensors where their sharding rules do not."""

number_of = torch.ops.aten._local_scalar_dense.default
"""The operation by which ``float()``, ``item()`` and ``if`` read a tensor."""

AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor
"""The local tensor of a DTensor that is still on its way. Its ``wait()`` gives the plain one."""

# Process groups

AllGather = _fsdp_api.AllGather
ReduceScatter = _fsdp_api.ReduceScatter
"""The interfaces of a user's own collectives, as FSDP2's ``set_custom_all_gather()`` and
``set_custom_reduce_scatter()`` take them."""

symmetric_memory = _symmetric_memory
"""The pool of symmetric memory of a device, and its registration with all ranks of a group."""

AllgatherOptions = c10d.AllgatherOptions
"""The only options of a collective that ``torch.distributed`` does not export."""

default_group = c10d._get_default_group
"""The group of all ranks. It raises if there is none; ``dist.group.WORLD`` is ``None`` then."""

default_store = c10d._get_default_store
"""The store at which all ranks met. Through it they tell each other what collectives cannot."""

default_timeout = c10d._get_default_timeout
"""How long the collectives of a backend may last, if nobody said."""


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether nobody has destroyed ``group``."""
    return group in c10d._world.pg_map


def unwrapped(backend: Any) -> Any:
    """Return the backend itself, without the wrapper that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts
    around it. In torch 2.11 the wrapper can neither abort nor split it."""
    wrapper: Any = getattr(c10d, "_ProcessGroupWrapper", ())  # comes with gloo
    while isinstance(backend, wrapper):
        backend = backend.wrapped_pg
    return backend


_NCCL2: Any = getattr(c10d, "ProcessGroupNCCL2", ())


def is_split_by_options(backend: Any) -> bool:
    """Return whether NCCL's options take ``backend`` as what to split a communicator from. They
    refuse the ProcessGroupNCCL2 that torch 2.15 makes of ``"nccl"``, which torch's Python splits
    from the default group alone."""
    return not isinstance(backend, _NCCL2)


def make_group(
    name: str,
    ranks: Sequence[int],
    backend: dist.Backend,
    options: Any,
    timeout: timedelta,
    split_from: Any = None,
    split_color: int = 0,
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, in this order. Only they take part in making it. NCCL
    splits its communicator from that of the backend ``split_from`` (:func:`is_split_by_options`).
    Then all ranks of that one take part, each with the ``split_color`` of its own new group.

    ``torch.distributed.new_group()`` cannot do that. It sorts the ranks. And it names a group by
    how many this rank has made, a number that may differ on other ranks.
    Of a bare ``ProcessGroupGloo``, ``destroy_process_group()`` would not know, nor end its threads.
    """
    default = default_group()
    if split_from is not None:
        options.split_from, options.split_color = split_from, split_color
    # If the default group is bound to a device, NCCL would split it, which takes all its ranks.
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            default_store(),
            c10d.GroupName(name),
            backend_options=options,
            timeout=timeout,
            group_desc=name.rsplit("_", 2)[0],
        )
    finally:
        default.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def let_go_of_groups(mesh: DeviceMesh) -> None:
    """Make ``mesh`` forget its process groups. Otherwise it keeps them until Python ends."""
    mesh._pg_registry.clear()


# Checkpoints

StorageInfo = filesystem._StorageInfo
"""Where an entry of a checkpoint lies in its file. It is part of the metadata."""

DistWrapper = checkpoint_utils._DistWrapper
"""What a save or load of checkpoints makes first, on every rank: it sends objects between them."""


def patch_state_dicts(
    distribute_tensor: Callable[[Callable[..., Any]], Callable[..., Any]],
    distribute_tensors: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap the two functions by which torch's ``set_state_dict()`` family cuts whole tensors."""
    module: Any = _state_dict_utils
    module.distribute_tensor = distribute_tensor(module.distribute_tensor)
    module._distribute_tensors = distribute_tensors(module._distribute_tensors)
