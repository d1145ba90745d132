"""Predict what others measured and published, each beside the measurement.

Three tables are those that devices' products within training are fitted to, by their first row:
their errors say nothing. What steps lose with scale is the time at a row over the time at the
first. Below the tables it says what is guessed of them, and what cannot be said.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Training
from fsdp_overlap.tools.simulator.estimate import StepCost, count_equal_blocks, estimate, measure
from harness.markdown import markdown_table

GIB = 2**30
COLUMNS = ["table", "GPUs", "tokens/s", "step, %", "loss, %", "predicted", "GiB", "predicted"]
DTYPES = ("dtype", "gather_dtype", "reduce_dtype")
FLEX_BLOCK = 128
"""Queries, and keys, of a block that FlexAttention computes or leaves out."""


def mpt(width: int, blocks: int, heads: int) -> nn.Module:
    """An MPT, as a GPT-2 of transformers: the same matrices, and biases beside them."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        n_embd=width,
        n_layer=blocks,
        n_head=heads,
        n_positions=2048,
        vocab_size=50368,
        activation_function="gelu",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


mpt_125m = partial(mpt, 768, 12, 12)
mpt_350m = partial(mpt, 1024, 24, 16)
mpt_760m = partial(mpt, 1536, 24, 12)
mpt_1b = partial(mpt, 2048, 24, 16)
mpt_3b = partial(mpt, 2560, 32, 20)
mpt_7b = partial(mpt, 4096, 32, 32)
mpt_13b = partial(mpt, 5120, 40, 40)


def qwen3_30b() -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40960,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


def attend_within_windows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Do the work of FlexAttention with windows and sinks, on what no values are read of. All have
    shape ``[batch, heads, tokens, width]``; return ``[batch, tokens, heads, width]``."""
    attend = partial(F.scaled_dot_product_attention, scale=options["scaling"], enable_gqa=True)
    if sliding_window is None:
        output = attend(query, key, value, is_causal=True)
    else:
        # As many scores as where each block of queries reads each block that its window touches.
        read = (1 + -(-(sliding_window - 1) // FLEX_BLOCK)) * FLEX_BLOCK
        parts = (
            whole.unflatten(2, (-1, read)).transpose(1, 2).flatten(0, 1)
            for whole in (query, key, value)
        )
        output = attend(*parts).unflatten(0, (len(query), -1)).transpose(1, 2).flatten(2, 3)
    if s_aux is not None:
        # A sink adds to the sum that a row of scores is divided by; a column stands for the sums.
        output = output * torch.sigmoid(output[..., :1] - s_aux.view(1, -1, 1, 1))
    return output.transpose(1, 2).contiguous(), None


def gpt_oss(blocks: int, experts: int) -> nn.Module:
    from transformers import AttentionInterface, AutoModelForCausalLM, GptOssConfig

    AttentionInterface.register("windows_and_sinks", attend_within_windows)
    config = GptOssConfig(num_hidden_layers=blocks, num_local_experts=experts, use_cache=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    # transformers' own for it is the eager one, which keeps all scores.
    model.config._attn_implementation = "windows_and_sinks"
    return model


gpt_oss_20b = partial(gpt_oss, 24, 32)
gpt_oss_120b = partial(gpt_oss, 36, 128)


@dataclass(frozen=True)
class Row:
    """Tokens a second and GPU, and GiB if they were published."""

    gpus: int
    tokens: float
    memory: float | None = None


@dataclass(frozen=True)
class Published:
    """``is_fitted``: whether products of the device are fitted to the first row. ``guessed``: what
    the source does not say; ``left_out``: what it says and the simulator cannot be told.
    ``is_rented``: whether a cloud rents the GPUs out; ``is_allocated``: whether memory is what
    tensors had, and not what the allocator took."""

    name: str
    source: str
    device: str
    fabric: str
    training: Training
    rows: tuple[Row, ...]
    compiles: bool = False
    expandable_segments: bool = False
    attention: str = "flash"
    is_rented: bool = False
    is_fitted: bool = False
    is_allocated: bool = False
    guessed: str = ""
    left_out: str = ""


def tables() -> tuple[Published, ...]:
    """Those of published.toml."""
    found: dict[str, Published] = {}
    for keys in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["table"]:
        training = {
            key: getattr(torch, value) if key in DTYPES else value
            for key, value in keys.pop("training", {}).items()
        }
        keys["rows"] = tuple(Row(*row) for row in keys["rows"])
        if like := keys.pop("like", None):
            keys["training"] = replace(found[like].training, **training)
            found[keys["name"]] = replace(found[like], **keys)
        else:
            found[keys["name"]] = Published(**keys, training=Training(**training))
    return tuple(found.values())


def device_of(table: Published) -> Device:
    device = Device.read(table.device).with_attention(table.attention)
    return device.rented() if table.is_rented else device


def predict(table: Published, gpus: int) -> StepCost:
    training = replace(table.training, gpus=gpus)
    device = device_of(table)
    costs = Costs(
        device,
        Fabric.read(table.fabric),
        compiles=table.compiles,
        expandable_segments=table.expandable_segments,
    )
    if training.microbatches == 1:
        return measure(training, costs, with_exposed=False)
    return estimate(training, costs, count_equal_blocks(training.model))


def lines(table: Published) -> Iterator[list[str]]:
    first = table.rows[0]
    took: dict[int, tuple[float, float]] = {}
    for row in table.rows:
        found = predict(table, row.gpus)
        took[row.gpus] = table.training.tokens / row.tokens, found.seconds
        loss, predicted = "", ""
        if row is not first:
            lost, says = (
                now / before - 1
                for now, before in zip(took[row.gpus], took[first.gpus], strict=True)
            )
            loss, predicted = f"{100 * lost:.1f}", f"{100 * says:.1f}"
        yield [
            table.name if row is first else "",
            str(row.gpus),
            f"{row.tokens:.0f}",
            "fitted"
            if table.is_fitted and row is first
            else _error(found.seconds, took[row.gpus][0]),
            loss,
            predicted,
            "" if row.memory is None else f"{row.memory:.1f}",
            f"{(found.memory if table.is_allocated else found.reserved) / GIB:.1f}",
        ]


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = tables()
    numbers = range(1, len(found) + 1)
    parser.add_argument(
        "--table",
        type=int,
        nargs="+",
        choices=numbers,
        default=numbers,
        help="the first table, the second and so on; all if left out",
    )
    chosen = [found[number - 1] for number in parser.parse_args().table]
    console = Console(stderr=True)
    rows: list[list[str]] = []
    for table in chosen:
        if not console.is_terminal:
            console.print(table.name, markup=False)
        with console.status(table.name):
            try:
                rows += lines(table)
            except ValueError as error:  # no torchao
                console.print(f"{table.name}: {error}", markup=False)
    print(markdown_table(COLUMNS, rows), "\n")
    for table in chosen:
        guessed = f"guessed: {table.guessed}; " if table.guessed else ""
        left_out = f"left out: {table.left_out}; " if table.left_out else ""
        print(f"- {table.name}: {guessed}{left_out}{table.source}")


if __name__ == "__main__":
    main()
