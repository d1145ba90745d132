"""Mixtures of experts on emulated time: what is spread, what travels, and how much is computed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from fsdp_overlap.simulator import (
    Fsdp2Training,
    Training,
)
from fsdp_overlap.simulator.mixture import Mixture
from fsdp_overlap.simulator.models import model_of
from support.predicted import kernels, predict, write_config

WIDTH, INNER, EXPERTS, CHOSEN, TOKENS = 32, 48, 8, 2, 128
MIXTURES = 3
OF_EXPERTS = EXPERTS * 3 * WIDTH * INNER
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": MIXTURES + 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": CHOSEN,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(CONFIG, tmp_path)


predicted = partial(predict, sequence=TOKENS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("moonlight-16b", 15_960_108_544),
        # 671,026,419,200 less the biases by which experts are balanced, which are no parameters.
        ("deepseek-v3", 671_026_419_200 - 58 * 256),
    ],
)
def test_models_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = model_of(name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("kind", [Training, Fsdp2Training])
def test_tokens_travel_to_their_experts_and_back(config: str, kind: type[Training]) -> None:
    """Twice in forward, and twice in backward."""
    sent = kernels(predicted(config, kind, expert_parallel=4), "ncclDevKernel_all_to_all")
    assert len(sent) == 4 * MIXTURES
    assert {each["args"]["In msg nelems"] for each in sent} == {TOKENS * CHOSEN * WIDTH * 2}
    assert not kernels(predicted(config, kind), "ncclDevKernel_all_to_all")


def test_experts_are_gathered_by_the_ranks_that_have_the_same(config: str) -> None:
    gathered = Counter(
        each["args"]["Out msg nelems"]
        for each in kernels(predicted(config, expert_parallel=4), "ncclDevKernel_all_gather")
    )
    # This rank's experts, in bfloat16; in backward again.
    assert gathered[OF_EXPERTS // 4 * 2] == 2 * MIXTURES
    reduced = kernels(predicted(config, expert_parallel=4), "ncclDevKernel_reduce_scatter")
    sizes = Counter(each["args"]["In msg nelems"] for each in reduced)
    assert sizes[OF_EXPERTS // 4 * 4] == MIXTURES


def test_copies_of_experts_are_reduced_too(config: str) -> None:
    prediction = predicted(config, expert_parallel=4, replicas=2)
    reduced = kernels(prediction, "ncclDevKernel_all_reduce")
    sizes = Counter(each["args"]["Out msg nelems"] for each in reduced)
    # Of 16 ranks 8 have a copy, in which 2 have the same experts.
    assert sizes[OF_EXPERTS // 4 // 2 * 4] == MIXTURES


@pytest.mark.parametrize("experts", [1, 4])
def test_as_much_is_computed_wherever_experts_are(config: str, experts: int) -> None:
    """Two products in forward and four in backward, of all that tokens chose."""
    assert len(kernels(predicted(config, expert_parallel=experts), "bmm")) == 6 * MIXTURES


def test_a_mixture_is_its_experts_weighted_mean() -> None:
    """Of experts that are all the same, each token gets what one of them says."""
    torch.manual_seed(0)
    mixture = Mixture(EXPERTS, CHOSEN, WIDTH, INNER, None, None)
    with torch.no_grad():
        for weights in mixture.experts.parameters():
            weights.copy_(torch.randn_like(weights[0]).expand_as(weights) / 8)
    tokens = torch.randn(2, 8, WIDTH)
    one = mixture.experts(tokens.flatten(0, 1).expand(EXPERTS, -1, -1))[0]
    torch.testing.assert_close(mixture(tokens).flatten(0, 1), one)
