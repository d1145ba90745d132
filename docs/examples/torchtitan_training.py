"""torchtitan's own program, models and trainer, on units of ours: run it by

    torchrun --nproc-per-node 2 docs/examples/torchtitan_training.py --folder /tmp/run \
        --config llama3 --training.steps 10

or, with ``--fsdp2``, on FSDP2's. All other arguments are torchtitan's. With a checkpoint in the
folder it goes on where it stopped. ``--config`` is one of ``torchtitan_configs.py``, or of
torchtitan's own with ``--module llama3``.

On GPUs one line is all that differs from ``torchrun -m torchtitan.train``: ``with
patch_fsdp2()``. torchtitan has to be imported within, because it imports ``fully_shard`` by
name. On a CPU it needs what `stand_in_for_gpu` puts in a GPU's place. Its wheel has neither a
tokenizer nor texts, so `write_assets` makes small ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from fsdp_overlap import patch_fsdp2

# ---- in place of a GPU ----


class StandInForCuda:
    """Answers for a CPU what torchtitan asks ``torch.cuda``."""

    def set_device(self, device: torch.device) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self) -> None:
        pass

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def get_device_name(self, device: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**30)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Flex attention by a whole mask. The original has no backward on a CPU."""
    mask = create_mask(
        block_mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], query.device.type
    )
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return output, None


def all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: Any = None
) -> None:
    """The same in one tensor, of parts of any sizes. Of a list gloo wants equal ones."""
    received = torch.cat(outputs)
    sizes = [len(output) for output in outputs]
    sent = [len(part) for part in inputs]
    dist.all_to_all_single(received, torch.cat(inputs), sizes, sent, group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part)


def stand_in_for_gpu() -> None:
    """Call it before any other module of torchtitan is imported, because they import by name what
    is replaced here."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", StandInForCuda()

    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = attend
    torch.compiler.set_stance("force_eager")  # a CPU computes masks faster than it compiles them
    dist.all_to_all = all_to_all  # type: ignore[assignment]


def reduce_without_nccl() -> None:
    """FSDP2 reduces with a divisor of the user's by an operation that NCCL alone has, unless it is
    told to take a plain sum."""
    unit = torch.distributed.fsdp.FSDPModule
    set_factor = unit.set_gradient_divide_factor

    def set_factor_and_sum(self: Any, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    unit.set_gradient_divide_factor = set_factor_and_sum  # type: ignore[method-assign]


# ---- in place of downloads ----


def write_assets(folder: Path) -> None:
    """Writes a tokenizer of single bytes, and texts of random words in a fixed order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "tokenizer").mkdir()
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))

    (folder / "texts").mkdir()
    choice = random.Random(0)
    words = ["".join(choice.choices("abcdefghij", k=5)) for _ in range(32)]
    with (folder / "texts" / "texts.jsonl").open("w") as file:
        for _ in range(1000):
            first = choice.randrange(32)
            text = " ".join(words[(first + 3 * index) % 32] for index in range(20))
            file.write(json.dumps({"text": text}) + "\n")


def assets_in(folder: Path) -> Path:
    """The assets, which all ranks write at once if they are not there. One of them wins."""
    assets = folder / "assets"
    if not assets.exists():
        folder.mkdir(parents=True, exist_ok=True)
        mine = Path(tempfile.mkdtemp(dir=folder))
        write_assets(mine)
        try:
            mine.rename(assets)
        except OSError:
            shutil.rmtree(mine)
    return assets


# ---- training ----


def train(folder: Path, is_fsdp2: bool, arguments: list[str]) -> None:
    assets = assets_in(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
    sys.argv[1:] = [
        *("--module", "torchtitan_configs"),
        *("--dump_folder", str(folder)),
        *("--hf_assets_path", str(assets / "tokenizer")),
        *("--dataloader.dataset_path", str(assets / "texts")),
        *arguments,
    ]
    with contextlib.nullcontext() if is_fsdp2 else patch_fsdp2():
        if not torch.cuda.is_available():
            stand_in_for_gpu()
            if is_fsdp2:
                reduce_without_nccl()
        from torchtitan.train import main

        main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="seen by all ranks")
    parser.add_argument("--fsdp2", action="store_true", help="train on FSDP2's units")
    options, arguments = parser.parse_known_args()
    train(options.folder, options.fsdp2, arguments)
