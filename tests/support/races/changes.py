"""Changes to libraries, made in memory: they undo a fix that no release was without, make one that
no release has, or leave out what needs more than one rank or a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def hold_no_reduced_gradients() -> None:
    """Let FSDP2 free what an all-reduce still works on, as pytorch#180889 did, and #179443 where
    the gradients are reduced in their own dtype."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    state: Any = module.AllReduceState
    module.AllReduceState = lambda _, event: state(None, event)  # type: ignore[misc, assignment]


def do_not_wait_between_pieces() -> None:
    """Let FSDP2 take a backward of a part of a group for one of the whole group."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    group: Any = module.FSDPParamGroup
    post_backward, states = group.post_backward, module.TrainingState

    def run(self: Any, *unused: Any) -> None:
        if self._training_state == states.FORWARD:
            self._training_state = states.PRE_BACKWARD
        post_backward(self, *unused)

    group.post_backward = run


def do_not_compare_shards() -> None:
    """Let Megatron-FSDP not compare shards with those of ranks that do not exist."""
    from megatron_fsdp import param_and_grad_buffer

    param_and_grad_buffer.validate_uneven_dtensor = lambda _: None


def wait_for_gradient_buffers() -> None:
    """Let Megatron-FSDP's current stream wait for reductions from buffers that it takes again."""
    from megatron_fsdp import param_and_grad_buffer

    do_not_compare_shards()
    pipeline: Any = param_and_grad_buffer.GradReducePipeline
    enforce = pipeline._enforce_double_buffer_limit

    def enforce_and_wait(self: Any, buckets: Any) -> None:
        before = len(self.grad_reduce_queue)
        enforce(self, buckets)
        if len(self.grad_reduce_queue) < before:
            torch.cuda.current_stream().wait_stream(self.rs_stream)

    pipeline._enforce_double_buffer_limit = enforce_and_wait


def allocate_gradients_where_reduced() -> None:
    """Let Megatron-FSDP v2 allocate gradients on the stream that reduces them."""
    from megatron_fsdp.experimental import DBuffer
    from megatron_fsdp.experimental.module import FsdpModule

    begin = FsdpModule._lazy_init_context

    def begin_and_allocate(self: Any) -> None:
        if self._context is not None:
            return
        begin(self)
        with torch.cuda.stream(self.context.reduce_scatter_stream):
            groups = [g for m in self.context.forward_order for g in m._parameter_groups]
            for group in groups:
                old = group.main_grad
                if old is not None:
                    group.main_grad = DBuffer(
                        mesh=old.mesh,
                        placements=old.placements,
                        tensor_shapes=old.layout.tensor_shapes,
                        dtype=old.dtype,
                        device=old.device,
                    )

    FsdpModule._lazy_init_context = begin_and_allocate


def offload_without_transformer_engine() -> None:
    """Let Megatron's offloading set its flag without Transformer Engine."""
    from megatron.core.extensions import transformer_engine

    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)


def wait_before_reload() -> None:
    """Let Megatron's offloading wait for the copy to the host before it copies back."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

    offload_without_transformer_engine()
    handler: Any = module.ChunkOffloadHandler
    pop = handler.tensor_pop

    def wait_and_pop(self: Any, tag: Any) -> Any:
        if not isinstance(tag, torch.Tensor):
            group = self.offload_groups[tag[0] - 1]
            group.wait_offload_event(torch.cuda.current_stream())
        return pop(self, tag)

    handler.tensor_pop = wait_and_pop
