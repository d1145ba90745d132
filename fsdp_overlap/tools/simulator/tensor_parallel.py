"""Models of transformers cut by tensor parallelism, as torchtitan cuts Llama: with norms and
residuals over the sequence."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_overlap.blocks import find_blocks


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Cut ``model``, a module, over ``mesh``, by the plan that transformers has for the products
    of its blocks. Between these, ranks have parts of the sequence. The embedding and the head are
    cut by words, and logits stay so: use ``loss_parallel()``. All ranks must have the same weights.

    Raises:
        ValueError: there is no such plan, or the model's sizes are no multiples of the ranks.
    """
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if not plan or not {"colwise", "rowwise"} >= set(plan.values()) or not _ends_alike(model, base):
        raise ValueError(
            f"tensor_parallel={mesh.size()}: {type(model).__name__} is not cut, because "
            "transformers has no plan for it of columns and rows alone, or its embedding and head "
            "are not as Llama's are, which has them apart"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % mesh.size():
            raise ValueError(
                f"tensor_parallel={mesh.size()}: {name}={getattr(config, name)} is no multiple of "
                "it"
            )
    # Nobody sends weights: each rank has made all of them.
    cut = partial(parallelize_module, device_mesh=mesh, src_data_rank=None)
    for block in find_blocks(model):
        cut(block, parallelize_plan=_of_block(block, plan))
    cut(
        model,
        parallelize_plan={
            f"{model.base_model_prefix}.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            f"{model.base_model_prefix}.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )


def _ends_alike(model: Any, base: Any) -> bool:
    """Return whether the model has an embedding, a last norm and a head of the names that Llama
    has, and the head has a weight of its own."""
    names = ("embed_tokens", "norm")
    has_all = all(hasattr(base, name) for name in names) and hasattr(model, "lm_head")
    return has_all and base.embed_tokens.weight is not model.lm_head.weight


class Styles(NamedTuple):
    """What cuts products of a block by columns and by rows, and what gathers the sequence."""

    colwise: type[ColwiseParallel] = ColwiseParallel
    rowwise: type[RowwiseParallel] = RowwiseParallel
    gather: type[PrepareModuleInput] = PrepareModuleInput


def _of_block(block: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Return what each module of a block does. A module whose products are cut by columns gathers
    the sequence once for all of them."""
    styles: dict[str, ParallelStyle] = {}
    kinds = {pattern.partition(".*.")[2]: kind for pattern, kind in plan.items()}
    of = _styles_for([block.get_submodule(name) for name in kinds])
    for inside, kind in kinds.items():
        if kind == "rowwise":
            styles[inside] = of.rowwise(output_layouts=Shard(1), use_local_output=False)
            continue
        styles[inside] = of.colwise()
        user = inside.rpartition(".")[0]
        styles[user] = _gather_sequence(block.get_submodule(user), of.gather)
    for name, module in block.named_modules():
        if name not in styles and next(module.parameters(recurse=False), None) is not None:
            styles[name] = SequenceParallel()
    return styles


def _styles_for(products: list[nn.Module]) -> Styles:
    """Return torch's, or torchao's, which gather numbers in float8, where all are multiplied."""
    if any(type(product) is nn.Linear for product in products):
        return Styles()
    from torchao.float8 import float8_tensor_parallel as in_float8

    return Styles(
        in_float8.Float8ColwiseParallel,
        in_float8.Float8RowwiseParallel,
        in_float8.PrepareFloat8ModuleInput,
    )


def _gather_sequence(module: nn.Module, gather: type[PrepareModuleInput]) -> PrepareModuleInput:
    """Return what gathers the input, which transformers gives to attention by name."""
    if "hidden_states" in inspect.signature(module.forward).parameters:
        name = "hidden_states"
        return gather(
            input_kwarg_layouts={name: Shard(1)}, desired_input_kwarg_layouts={name: Replicate()}
        )
    return gather(input_layouts=Shard(1), desired_input_layouts=Replicate())
