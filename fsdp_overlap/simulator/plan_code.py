"""A plan as code: what to write into a training program to have it."""

from __future__ import annotations

from dataclasses import fields

from fsdp_overlap.simulator.training import Training

_SELECT = '''

def keep_some():
    """Keeps attention's output and every second product's, and runs the rest again in backward."""
    products = count()

    def policy(context, operator, *args, **kwargs):
        is_kept = operator in KEPT or (operator in PRODUCTS and next(products) % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


KEPT = {torch.ops.aten._scaled_dot_product_flash_attention.default}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}
'''
_CHECKPOINT = """    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False{kept})
"""
_FLOAT8 = """    # For casts as predicted compile the blocks, each by block.compile().
    inner = {{layer for block in find_blocks(model) for layer in block.modules()}}
    convert_to_float8_training(
        model,
        module_filter_fn=lambda layer, name: (
            layer in inner and layer.in_features % 16 == layer.out_features % 16 == 0
        ),
        config=Float8LinearConfig(enable_fsdp_float8_all_gather={gathers}),
    )
    inner.clear()  # which torchao would keep until Python collects garbage
"""
_OPTIMIZERS = {
    "adamw": ("AdamW", "AdamW(model.parameters())"),
    "torch-adamw": ("", "torch.optim.AdamW(model.parameters(), fused=True)"),
    "muon": ("Muon", "Muon(model)"),
}
# What the code below says, or what makes no difference to it.
_SAID = {
    *("model", "gpus", "replicate", "batch", "sequence", "microbatches", "checkpointing"),
    *("blocks_a_unit", "stage", "layout", "prefetch", "param_dtype", "reduce_dtype"),
    *("gather_dtype", "products", "optimizer", "reshard_after_forward", "reduce_each", "tensor"),
}


def code_of(training: Training) -> str:
    """A module with two functions: ``shard(model)`` returns an optimizer, and ``train_step`` makes
    a step.

    Raises:
        ValueError: an option is set that the code does not speak of.
    """
    for each in fields(training):
        if each.name not in _SAID and getattr(training, each.name) != each.default:
            raise ValueError(f"{each.name}={getattr(training, each.name)!r}: no code for that")
    return f"{_head(training)}\n\n{_shard(training)}\n\n{_step(training)}"


def _head(training: Training) -> str:
    names = ["FsdpContext", "MixedPrecisionPolicy", "find_blocks", "fully_shard"]
    wire = ["QuantizedCommPolicy"] if training.wire_dtype is not None else []
    float8 = ["Float8LinearConfig", "convert_to_float8_training"]
    if training.gathers_for_products:
        float8.append("precompute_float8_dynamic_scale_for_fsdp")
    kind = training.checkpointing
    ours, _ = _OPTIMIZERS[training.optimizer]
    selective = ["CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"]
    lines = [
        "from itertools import count" if kind == "selective" else "",
        "from functools import partial" if kind != "none" else "",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh"
        if training.tensor == 1
        else "",
        {
            "none": "",
            "full": "from torch.utils.checkpoint import checkpoint",
            "selective": f"from torch.utils.checkpoint import {', '.join(selective)}",
        }[kind],
        f"from torchao.float8 import {', '.join(float8)}" if training.products else "",
        f"from fsdp_overlap import {', '.join(sorted([*names, *wire]))}",
        f"from fsdp_overlap.layout import {type(training.layout).__name__}",
        f"from fsdp_overlap.optim import {ours}" if ours else "",
    ]
    select = _SELECT if kind == "selective" else ""
    return "\n".join(line for line in lines if line) + "\n" + select


def _shard(training: Training) -> str:
    policies = "mp_policy=precision"
    wire = ""
    if training.wire_dtype is not None:
        wire = f"    wire = QuantizedCommPolicy({training.wire_dtype})\n"
        policies += ", comm_policy=wire"
    part = ""
    if training.reshard_after_forward is not None:
        part = f", reshard_after_forward={training.reshard_after_forward}"
    kept = {"none": None, "full": "", "selective": ", context_fn=keep_some"}[training.checkpointing]
    size = training.blocks_a_unit
    if size == 1:
        units = f"    for block in blocks:\n        fully_shard(block, ctx, {policies}{part})\n"
    else:
        units = (
            f"    for first in range(0, len(blocks), {size}):\n"
            f"        unit = blocks[first : first + {size}]\n"
            f"        unit = unit if len(unit) > 1 else unit[0]\n"
            f"        fully_shard(unit, ctx, {policies}{part})\n"
        )
    precision = f"{training.param_dtype}, {training.reduce_dtype}"
    return (
        f"{_mesh(training)}"
        f"    ctx = FsdpContext(mesh, layout={training.layout!r}, prefetch={training.prefetch})\n"
        f"    precision = MixedPrecisionPolicy({precision})\n"
        f"{wire}"
        f"{_FLOAT8.format(gathers=training.gathers_for_products) if training.products else ''}"
        "    blocks = find_blocks(model)\n"
        f"{'' if kept is None else _CHECKPOINT.format(kept=kept)}"
        f"{units}"
        f"    fully_shard(model, ctx, {policies})\n"
        f"{'' if training.stage == 3 else f'    model.set_zero_stage({training.stage})' + chr(10)}"
        f"    return {_OPTIMIZERS[training.optimizer][1]}\n"
    )


def _mesh(training: Training) -> str:
    """The first lines of ``shard()``, which say what ``mesh`` is."""
    copies, tensor = training.replicate, training.tensor
    ranks = training.gpus // copies // tensor
    sizes, names = f"({ranks},)", '("shard",)'
    if copies > 1:
        sizes, names = f"({copies}, {ranks})", '("replicate", "shard")'
    if tensor == 1:
        return (
            'def shard(model, device="cuda"):\n'
            f"    mesh = init_device_mesh(device, {sizes}, mesh_dim_names={names})\n"
        )
    return (
        "def shard(model, grid):\n"
        f'    """``model``: cut by tensor parallelism over ``grid["tensor"]``, {tensor} ranks."""\n'
        f"    mesh = grid[{names}]  # of {sizes} ranks\n"
    )


def _step(training: Training) -> str:
    count, size = training.microbatches, training.batch
    sequences = f"{size} sequence{'s' if size > 1 else ''} of {training.sequence} tokens"
    computes = "    precompute_float8_dynamic_scale_for_fsdp(model)\n"
    scales = computes if training.gathers_for_products else ""
    if count == 1:
        return (
            "def train_step(model, optimizer, loss_of, batch):\n"
            f'    """``batch``: {sequences}, of this rank."""\n'
            "    loss_of(model, batch).backward()\n"
            "    optimizer.step()\n"
            "    optimizer.zero_grad()\n"
            f"{scales}"
        )
    sync = ""
    if not training.reduce_each:
        sync = f"        model.set_requires_gradient_sync(number == {count - 1})\n"
    loop = "number, batch in enumerate(batches)" if sync else "batch in batches"
    return (
        "def train_step(model, optimizer, loss_of, batches):\n"
        f'    """``batches``: {count} times {sequences}, of this rank."""\n'
        f"    for {loop}:\n"
        f"{sync}"
        f"        (loss_of(model, batch) / {count}).backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        f"{scales}"
    )
