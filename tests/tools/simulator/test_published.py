"""The published runs that predictions are compared with, as far as they can be checked without
predicting them, which takes long."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fsdp_overlap.tools.simulator import Device, Fabric
from fsdp_overlap.tools.simulator.models import model_of
from support.pages import ROOT


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    folder = str(ROOT / "scripts" / "bench")
    sys.path.insert(0, folder)
    yield importlib.import_module("published")
    sys.path.remove(folder)


# Of MPT by llm-foundry's tables, which has no biases; of the others by their model cards.
SIZES = {
    "qwen3_30b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "mpt_125m": 125_311_488,
    "mpt_350m": 355_985_408,
    "mpt_760m": 760_470_528,
    "mpt_1b": 1_315_950_592,
    "mpt_3b": 2_651_837_440,
    "mpt_7b": 6_658_859_008,
    "mpt_13b": 12_853_954_560,
}


@pytest.mark.parametrize("name", SIZES)
def test_models_have_as_many_parameters_as_theirs(published: Any, name: str) -> None:
    with torch.device("meta"):
        model = model_of(f"published:{name}")()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(SIZES[name], rel=0.002 if "mpt" in name else 0)


def test_windows_take_the_work_of_the_blocks_that_they_touch(published: Any) -> None:
    query = torch.empty(2, 4, 1536, 16, device="meta")
    key, sinks = torch.empty(2, 2, 1536, 16, device="meta"), torch.empty(4, device="meta")
    flops = []
    for window in (None, 128, 129, 130):
        with FlopCounterMode(display=False) as counter:
            output, _ = published.attend_within_windows(
                nn.Module(), query, key, key, None, window, sinks, scaling=1.0
            )
        assert output.shape == (2, 1536, 4, 16)
        flops.append(counter.get_total_flops())
    # A window that ends with its query reaches the block before; one of 130 tokens, a third.
    assert [each / flops[0] for each in flops] == [1, 2 / 12, 2 / 12, 3 / 12]


def test_rows_can_be_trained_as_their_tables_say(published: Any) -> None:
    for table in published.tables():
        Device.read(table.device).with_attention(table.attention)
        Fabric.read(table.fabric)
        assert [row.gpus for row in table.rows] == sorted({row.gpus for row in table.rows})
        assert table.source.startswith("https://")
        for row in table.rows:
            published.replace(table.training, gpus=row.gpus)  # which checks the numbers
    fitted = [table.device for table in published.tables() if table.is_fitted]
    assert sorted(fitted) == ["a100_sxm", "h100_500w", "h200_sxm"]
