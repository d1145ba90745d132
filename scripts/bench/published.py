"""Predict what others measured and published, each beside the measurement.

A table is predicted three times over: as a user would without any measurement, with products
stretched as another table of the same devices was fitted to, and, where there is no other one, to
its own first row, which says nothing then. Memory is predicted without any fit. What steps lose
with scale is the time at a row over the time at the first. Below the tables it says what is guessed
of them, and what cannot be said.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fsdp_overlap.simulator import Costs, Device, Fabric, Training
from fsdp_overlap.simulator.estimate import StepCost, count_equal_blocks, estimate, measure

GIB = 2**30


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


def gpt_oss(blocks: int, experts: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        num_hidden_layers=blocks,
        num_local_experts=experts,
        # A mask would be computed for the windows of every second block.
        layer_types=["full_attention"] * blocks,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    # transformers has no kernel with sinks for it but the eager one, which keeps all scores.
    model.config._attn_implementation = "sdpa"
    return model


gpt_oss_20b = partial(gpt_oss, 24, 32)
gpt_oss_120b = partial(gpt_oss, 36, 128)


@dataclass(frozen=True)
class Row:
    """Tokens a second and GPU, and the GiB that the allocator took if they were published."""

    gpus: int
    tokens: float
    memory: float | None = None


@dataclass(frozen=True)
class Published:
    """``like``: the table that products are fitted to, if not its own first row. ``guessed``: what
    the source does not say; ``left_out``: what it says and the simulator cannot be told."""

    name: str
    source: str
    device: str
    fabric: str
    training: Training
    rows: tuple[Row, ...]
    compiles: bool = False
    attention: str = "flash"
    like: Published | None = None
    guessed: str = ""
    left_out: str = ""


TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
DECEMBER = f"{TORCHTITAN}llama3_h100_202412_torchtitan.md"
JUNE = f"{TORCHTITAN}llama3-8b_h200_202506_trainy-whitefiber.md"
ASYNC_TP = f"{TORCHTITAN}asyncTP_llama3_h100_2025-06_torchtitan.md"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"

AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.md"

RECIPES = "https://github.com/NVIDIA-NeMo/Automodel/tree/main/examples/llm_benchmark"

LLAMA = Training(
    "llama3-8b", gpus=1, micro_batch_size=2, checkpointing="selective", optimizer="torch-adamw"
)
LLAMA_70B = replace(
    LLAMA, model="llama3-70b", gpus=8, tensor_parallel=8, micro_batch_size=16, checkpointing="full"
)
# Composer's FSDP reduced gradients in the precision of compute.
MPT = Training(
    "published:mpt_13b",
    gpus=1,
    micro_batch_size=2,
    sequence=2048,
    reduce_dtype=torch.bfloat16,
    optimizer="torch-adamw",
)
PURE = replace(MPT, dtype=torch.bfloat16)
MIXTURE = Training(
    "published:qwen3_30b",
    gpus=8,
    expert_parallel=8,
    expert_parallel_comm_backend="deepep",
    sequence=4096,
    dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    optimizer="torch-adamw",
    loss="fused",
    reduce_each=True,
)
OLD_KERNELS = "the rate of attention by Triton, with ALiBi"
OF_MIXTURES = "bfloat16 at rest; its fused kernels are as compiled ones; cuDNN's rate of attention"


def tables() -> tuple[Published, ...]:
    float8 = replace(LLAMA, linear_dtype="float8", gather_dtype=torch.float8_e4m3fn)
    eager = Published(
        "Llama 3.1 8B on H100 of 500 W",
        DECEMBER,
        "h100_500w",
        "nvlink4_400g",
        LLAMA,
        (Row(8, 5762, 82.4), Row(128, 5605, 67.0)),
        guessed="400 Gb/s a GPU",
    )
    compiled = replace(
        eager,
        name="the same, compiled",
        rows=(Row(8, 6667, 77.0), Row(128, 6514, 62.0)),
        compiles=True,
        like=eager,
    )
    compiled_float8 = replace(
        compiled,
        name="the same, compiled, float8",
        training=float8,
        rows=(Row(8, 8532, 76.8), Row(128, 8380, 61.8)),
    )
    h200 = Published(
        "Llama 3.1 8B on H200, compiled, float8",
        JUNE,
        "h200_sxm",
        "nvlink4_400g",
        float8,
        (Row(32, 10938, 47.96), Row(64, 10753, 46.97)),
        compiles=True,
        guessed="400 Gb/s a GPU; its memory is less than selective checkpointing keeps",
    )
    h100_mpt = Published(
        "MPT 13B on H100",
        FOUNDRY,
        "h100_sxm",
        "nvlink4_400g",
        MPT,
        (Row(8, 4792), Row(16, 4767), Row(32, 4811), Row(64, 4800)),
        guessed="400 Gb/s a GPU",
        left_out=OLD_KERNELS,
    )
    a100_mpt = Published(
        "MPT 7B on A100 of 40 GB, batch 18",
        FOUNDRY,
        "a100_sxm",
        "nvlink3_roce_200g",
        replace(PURE, model="published:mpt_7b", micro_batch_size=18, checkpointing="full"),
        (Row(32, 3725), Row(64, 3665), Row(128, 3623)),
        left_out=OLD_KERNELS,
    )
    smaller = {
        "3b": (6, (Row(32, 9914), Row(64, 9736), Row(128, 9538))),
        "1b": (10, (Row(64, 19001), Row(128, 18647))),
        "760m": (12, (Row(16, 29607), Row(32, 29648), Row(64, 29344), Row(128, 28940))),
        "350m": (18, (Row(16, 55413), Row(32, 53811), Row(64, 52689), Row(128, 51934))),
        "125m": (26, (Row(16, 130535), Row(32, 127122), Row(64, 125234), Row(128, 123936))),
    }
    qwen3 = Published(
        "Qwen3 30B-A3B on H100",
        AUTOMODEL,
        "h100_sxm",
        "nvlink4_400g",
        replace(MIXTURE, micro_batch_size=4, microbatches=16, checkpointing="full"),
        (Row(8, 12040),),
        compiles=True,
        attention="cudnn",
        like=h200,
        guessed=OF_MIXTURES,
    )
    oss = replace(
        qwen3,
        name="GPT-OSS 20B on H100",
        training=replace(
            MIXTURE, model="published:gpt_oss_20b", micro_batch_size=2, microbatches=16
        ),
        rows=(Row(8, 13058),),
        attention="flash",
        guessed="bfloat16 at rest; its fused kernels are as compiled ones; FlexAttention's rate",
        left_out="windows and sinks of attention",
    )
    gb200 = Published(
        "Qwen3 30B-A3B on GB200",
        RECIPES,
        "gb200",
        "nvl72",
        replace(MIXTURE, micro_batch_size=16, microbatches=4, checkpointing="full"),
        (Row(8, 28380),),
        compiles=True,
        like=h200,
        guessed="bfloat16 at rest; its fused kernels are as compiled ones; products as on an H200",
    )
    return (
        eager,
        compiled,
        compiled_float8,
        replace(
            compiled,
            name="Llama 3.1 70B, compiled, tensor parallelism of 8",
            source=ASYNC_TP,
            training=LLAMA_70B,
            rows=(Row(256, 597.3),),
        ),
        replace(
            compiled,
            name="the same, float8",
            training=replace(LLAMA_70B, linear_dtype="float8"),
            rows=(Row(256, 829, 71.9),),
            left_out="casts before gathers of activations",
        ),
        h200,
        h100_mpt,
        replace(
            h100_mpt,
            name="MPT 1B, batch 20",
            training=replace(MPT, model="published:mpt_1b", micro_batch_size=20),
            rows=(Row(16, 46037), Row(32, 45130), Row(64, 44402)),
            like=h100_mpt,
        ),
        a100_mpt,
        *(
            replace(
                a100_mpt,
                name=f"MPT {size.upper()}, batch {batch}",
                training=replace(PURE, model=f"published:mpt_{size}", micro_batch_size=batch),
                rows=rows,
                like=a100_mpt,
            )
            for size, (batch, rows) in smaller.items()
        ),
        qwen3,
        oss,
        replace(
            oss,
            name="GPT-OSS 120B on H100",
            training=replace(
                oss.training,
                model="published:gpt_oss_120b",
                gpus=64,
                expert_parallel=64,
                microbatches=4,
            ),
            rows=(Row(64, 7626),),
        ),
        gb200,
        replace(
            gb200,
            name="DeepSeek-V3 671B on GB200",
            training=replace(
                MIXTURE,
                model="deepseek-v3",
                gpus=64,
                expert_parallel=64,
                micro_batch_size=2,
                checkpointing="full",
            ),
            rows=(Row(64, 2815, 107.44e9 / GIB),),
        ),
        replace(
            gb200,
            name="GPT-OSS 120B on GB200",
            training=replace(
                MIXTURE,
                model="published:gpt_oss_120b",
                gpus=32,
                expert_parallel=16,
                micro_batch_size=4,
                microbatches=4,
            ),
            rows=(Row(32, 18693, 154.6e9 / GIB),),
            left_out="windows and sinks of attention",
        ),
    )


def predict(table: Published, gpus: int, matmul_stretch: float = 1.0) -> StepCost:
    training = replace(table.training, gpus=gpus)
    device = Device.read(table.device).with_attention(table.attention)
    costs = Costs(device, Fabric.read(table.fabric), matmul_stretch, compiles=table.compiles)
    if training.microbatches == 1:
        return measure(training, costs, with_exposed=False)
    return estimate(training, costs, count_equal_blocks(training.model))


@cache
def fit(table: Published) -> float:
    """How many times as long products take as the device's numbers say, by the first row."""
    if table.like is not None:
        return fit(table.like)
    first = table.rows[0]
    measured = table.training.tokens / first.tokens
    stretch, step = 1.0, 0.2
    found = predict(table, first.gpus, stretch).seconds
    while abs(found / measured - 1) > 1e-3:
        more = predict(table, first.gpus, stretch + step).seconds
        stretch += step * (measured - found) / (more - found)
        found = predict(table, first.gpus, stretch).seconds
    return stretch


def lines(table: Published) -> Iterator[list[str]]:
    stretch = fit(table)
    seconds = []
    for row in table.rows:
        unfitted, found = predict(table, row.gpus), predict(table, row.gpus, stretch)
        measured = table.training.tokens / row.tokens
        seconds.append((measured, found.seconds))
        is_first = row is table.rows[0]
        times = zip(seconds[-1], seconds[0], strict=True)
        losses = ["" if is_first else f"{100 * (now / before - 1):.1f}" for now, before in times]
        yield [
            table.name if is_first else "",
            str(row.gpus),
            f"{row.tokens:.0f}",
            _error(unfitted.seconds, measured),
            f"{stretch:.2f}" if is_first else "",
            "fitted" if is_first and table.like is None else _error(found.seconds, measured),
            *losses,
            "" if row.memory is None else f"{row.memory:.1f}",
            f"{found.reserved / GIB:.1f}",
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
    shown = Table(box=None, pad_edge=False)
    for name in (
        "table",
        "GPUs",
        "tokens/s",
        "step as is, %",
        "products",
        "step fitted, %",
        "loss, %",
        "predicted",
        "GiB",
        "predicted",
    ):
        shown.add_column(name, justify="left" if name == "table" else "right")
    console, progress = Console(width=160, highlight=False), Console(stderr=True)
    for table in chosen:
        if not progress.is_terminal:
            progress.print(table.name, markup=False)
        with progress.status(table.name):
            try:
                for line in lines(table):
                    shown.add_row(*line)
            except ValueError as error:  # no torchao
                shown.add_row(table.name, "")
                progress.print(f"{table.name}: {error}", markup=False)
    console.print(shown)
    for table in chosen:
        of_like = "" if table.like is None else f"fitted to {table.like.name}; "
        guessed = f"guessed: {table.guessed}; " if table.guessed else ""
        left_out = f"left out: {table.left_out}; " if table.left_out else ""
        console.print(f"- {table.name}: {of_like}{guessed}{left_out}{table.source}", markup=False)


if __name__ == "__main__":
    main()
