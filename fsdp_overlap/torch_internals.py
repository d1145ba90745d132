"""What the library uses of torch that torch does not promise to keep.

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
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import _ops, autograd, nn, overrides, profiler
from torch._C._dynamo import eval_frame
from torch._subclasses import fake_tensor
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
from torch.distributed.tensor import DTensor, _dtensor_spec, _op_schema, _random, placement_types
from torch.nn.modules import conv
from torch.optim import optimizer
from torch.utils import _device, _foreach_utils, _python_dispatch, _pytree, checkpoint

ATTRIBUTES = {
    # Tensors and their storages
    "Tensor._version": "how often a tensor was edited, which tells stale buffers and lost edits",
    "Tensor._base": "what a view is a view of, whose history an edit of the view changes",
    "UntypedStorage._cdata": "tells storages apart that have no memory, so no address",
    "Tensor._post_accumulate_grad_hooks": "what users want called when a gradient is there",
    "Tensor._backward_hooks": "what users want called with a gradient, before it is accumulated",
    "Parameter._is_param": "written by nn.Parameter on tensors of our class, and no user's",
    # DTensors, which sharded tensors are
    "DTensor.__new__": "makes one of the local tensor and the spec, without a check of either",
    "DTensor._local_tensor": "what this rank holds; to_local() is a node of autograd's graph",
    "DTensor._spec": "how a tensor lies over its mesh",
    "DTensor._op_dispatcher": "its sharding_propagator computes how the results of operations lie",
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
    "OpOverload._can_decompose": "whether inference mode left an operation whole",
    "ScriptObject._type": "tells process groups among the arguments of an operation",
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


def push_pending_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Push hooks of saved tensors as ``saved_tensors_hooks`` does, so that others may intercept
    it."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is around a forward. All-gathers do not go through it."""

without_transform = torch._C._functorch.get_unwrapped
"""The tensor that a transform of ``torch.func`` has wrapped."""

ProfilerBase = profiler._KinetoProfile
"""What ``torch.profiler.profile`` tells which activities to record."""

profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. Spans are named only then."""


@contextmanager
def running_backwards_by(run: Callable[..., Any]) -> Iterator[None]:
    """Call ``run(engine, *args, **kwargs)`` for every backward within, where torch would call
    ``engine(*args, **kwargs)``. No mode sees a backward begin and end."""
    engine: Any = autograd._engine_run_backward
    autograd._engine_run_backward = partial(run, engine)
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


def determinism_checks() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return what checkpointing compares when it recomputes a tensor, by name. Modes do not see
    that."""
    return checkpoint._allowed_determinism_checks_to_fns


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

DisableTorchFunction = torch._C.DisableTorchFunction
"""Within it modes do not see a call either, so that the emulated device does not see itself."""

is_torch_function_enabled = torch._C._is_torch_function_enabled
is_torch_function_all_disabled = torch._C._is_torch_function_all_disabled
"""Whether a subclass is asked about a call, so that the emulated device asks it too; and whether
modes see no calls either."""

disabled_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of classes that are asked nothing, as parameters are."""

parse_to = torch._C._nn._parse_to
"""What the arguments of ``tensor.to()`` mean."""

HigherOrderOperator = _ops.HigherOrderOperator
OpOverload = _ops.OpOverload
"""The classes of operators, which torch calls where a program calls functions. The first ones call
functions themselves, as flex attention does."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Shows a mode every operation. It is documented, and only its module is private."""

disable_current_modes = _python_dispatch._disable_current_modes
"""Within it no mode sees operations."""

get_current_function_mode_stack = overrides._get_current_function_mode_stack
"""The modes that see calls now. torch leaves a mode while it runs what the mode has seen."""

push_function_mode = overrides._push_mode
pop_function_mode = overrides._pop_mode
"""Have a mode see calls of this thread, without entering it, and end that: it was entered on
another thread, whose backward this thread runs."""

get_current_dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
"""The modes that see operations now."""

push_dispatch_mode = _python_dispatch._push_mode
pop_dispatch_mode = _python_dispatch._pop_mode
"""Do the same for operations."""

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
"""A tensor without memory, which torch makes to ask for a shape; and what makes them, and remembers
for all devices what shapes it found."""

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
masked_attention = torch.ops.aten._scaled_dot_product_efficient_attention
"""Attention as a GPU computes it, without and with a mask, which is not chosen for an emulated
device without values."""

attention_on_host = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Attention as the host computes it, and its backward, of which DTensor knows no sharding."""

SUPPORTED_NODES = _pytree.SUPPORTED_NODES
"""The classes that are nodes of trees, and how to take them apart. Users register more."""

tree_map_only = _pytree.tree_map_only
"""Changes all tensors in a tree. torch exports it nowhere else."""

default_device = _device
"""The module whose ``CURRENT_DEVICE`` is that of ``torch.set_default_device()``, if there is one.
``torch.get_default_device()`` makes a tensor to tell it."""

takes_default_device = _device._device_constructors
"""The functions that make tensors on the device of ``torch.set_default_device()``."""

group_tensors = torch._C._group_tensors_by_device_and_dtype
"""Groups the tensors of optimizers by device and dtype, as C++ knows them."""


has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel of its own for a device or a way to run."""


def run_kernel_of_cuda(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that a library has given ``operator`` for CUDA, on tensors that may lie
    elsewhere."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return operator.redispatch(keys, *args, **kwargs)


@contextmanager
def replacing_group_tensors(group: Callable[..., dict[Any, Any]]) -> Iterator[None]:
    """Have optimizers call ``group`` instead of :data:`group_tensors`."""
    with patch.object(torch._C, "_group_tensors_by_device_and_dtype", group):
        yield


@contextmanager
def wrapping_on(device: str, asked: Sequence[str]) -> Iterator[None]:
    """Have tensors of classes that are made of others lie on ``device`` where one of the types
    ``asked`` is asked for."""
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def wrap_there(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device")
        if given is not None and torch.device(given).type in asked:
            kwargs["device"] = device
        return wrap(*args, **kwargs)

    with patch.object(torch.Tensor, "_make_wrapper_subclass", wrap_there):
        yield


@contextmanager
def moving_random_states_by(call: Callable[..., Any]) -> Iterator[None]:
    """Have ``call`` call what moves the state of a device's generator, before and after a random
    operation on DTensors. torch does so from within the operation, where no mode is on."""

    def calling(method: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(method)(lambda *args: call(method, *args))

    owners = {
        _random._PhiloxState: ("__init__",),
        _random.OffsetBasedRNGTracker: ("_get_device_state", "_set_device_state"),
    }
    with ExitStack() as stack:
        for owner, names in owners.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, calling(getattr(owner, name))))
        yield


@contextmanager
def shaping_dtensors_on_host() -> Iterator[None]:
    """Have DTensor try out on the host's fake tensors what shape a result has. Those of the mesh's
    device need a build of torch for it."""

    def rebuild(arg: Any) -> Any:
        size, stride, dtype = arg.tensor_meta
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    with patch.object(_op_schema, "_rebuild_tensor_from_dtensor_meta", rebuild):
        yield


@contextmanager
def telling_raw_stream(current: Callable[[int], int]) -> Iterator[None]:
    """Have libraries with kernels of their own, such as bitsandbytes, ask ``current`` for CUDA's
    handle of the current stream."""
    with patch.object(torch._C, "_cuda_getCurrentRawStream", current, create=True):
        yield


@contextmanager
def telling_accelerator(device: torch.device) -> Iterator[None]:
    """Have torch's Python tell that its accelerator is ``device``."""
    with (
        patch.object(torch._C, "_get_accelerator", lambda *_: device),
        patch.object(torch._C, "_accelerator_getAccelerator", lambda: device),
    ):
        yield


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


def teach_fully_shard(state_of: Callable[[Any], Any]) -> None:
    """Make FSDP2's ``fully_shard.state(module)`` give what ``state_of`` gives, unless ``None``."""
    torchs_fully_shard: Any = fully_shard
    torchs_state_of = torchs_fully_shard.state

    @wraps(torchs_state_of)
    def state(module: Any) -> Any:
        ours = state_of(module)
        return torchs_state_of(module) if ours is None else ours

    torchs_fully_shard.state = state


def record_fully_sharded(module: nn.Module) -> None:
    """Note on ``module`` that ``fully_shard`` was called on it, where torch's other composable
    calls look. ``replicate()`` on a module around it leaves its parameters alone then."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def given_grad_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return what somebody set as the ``grad_dtype`` of ``parameter``. ``None`` if nobody did:
    gradients then have the parameter's dtype, also after a cast. Up to torch 2.14 a parameter does
    not tell whether its own dtype was set, and counts as one that follows casts."""
    if hasattr(parameter, "_has_grad_dtype_override"):
        is_given: bool = parameter._has_grad_dtype_override
    else:
        is_given = parameter.grad_dtype != parameter.dtype
    return parameter.grad_dtype if is_given else None


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``replicate()`` was called on ``module``, which trains the parameters in it
    then."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


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

name_of_group = c10d._get_process_group_name
"""The name that torch knows a group by, also one whose class is written in Python."""

names_of_groups = c10d._world.pg_names
"""The names of all groups. Of one whose class is written in Python, C++ has none."""

group_named = c10d._resolve_process_group
"""The group that has a name."""

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


def make_group(
    name: str,
    ranks: Sequence[int],
    backend: dist.Backend,
    options: Any,
    timeout: timedelta,
    split_from: Any = None,
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, in this order. Only they take part in making it. NCCL
    splits its communicator from that of the backend ``split_from``, which connects the same
    ranks.

    ``torch.distributed.new_group()`` cannot do that. It sorts the ranks. And it names a group by
    how many this rank has made, a number that may differ on other ranks.
    Of a bare ``ProcessGroupGloo``, ``destroy_process_group()`` would not know, nor end its threads.
    """
    default = default_group()
    if split_from is not None:
        options.split_from, options.split_color = split_from, 0  # all ranks have one color
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


def teach_state_dicts(
    distribute_tensor: Callable[[Callable[..., Any]], Callable[..., Any]],
    distribute_tensors: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap the two functions by which torch's ``set_state_dict()`` family cuts whole tensors."""
    module: Any = _state_dict_utils
    module.distribute_tensor = distribute_tensor(module.distribute_tensor)
    module._distribute_tensors = distribute_tensors(module._distribute_tensors)


# A device type of Python


def register_device(name: str, module: ModuleType) -> None:
    """Give torch a device type ``name``. ``module`` is what ``torch.cuda`` is for CUDA.

    From then on this is torch's only accelerator: backward does not order the streams of another.

    Raises:
        RuntimeError: CUDA is initialized. Initializing it later raises, too.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            f"this process uses CUDA: use the device {name!r} in a process of its own"
        )

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        """What C++ asks about the device, as in a barrier."""

        def is_available(self) -> bool:
            return bool(module.is_available())

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return False

    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch._C._acc.register_python_privateuseone_hook(Hooks())

    def refuse() -> None:
        raise RuntimeError(f"this process has a device {name!r}: use CUDA in a process of its own")

    torch.cuda._lazy_call(refuse)
