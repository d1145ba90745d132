"""Mixtures of experts on emulated time: what is spread, what travels, and how much is computed."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator import fake_ranks
from fsdp_overlap.tools.simulator import (
    Fsdp2Training,
    Training,
)
from fsdp_overlap.tools.simulator.mixture import spread_experts
from fsdp_overlap.tools.simulator.models import model_of
from support.predicted import kernels, known_to, predict, write_config

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Training, Fsdp2Training])
def test_tokens_travel_to_their_experts_and_back(config: str, kind: type[Training]) -> None:
    """Twice in forward, and twice in backward."""
    sent = kernels(predicted(config, kind, expert_parallel=4), "ncclDevKernel_all_to_all")
    assert len(sent) == 4 * MIXTURES
    assert {each["args"]["In msg nelems"] for each in sent} == {TOKENS * CHOSEN * WIDTH * 2}
    assert not kernels(predicted(config, kind), "ncclDevKernel_all_to_all")


@pytest.mark.slow
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


@pytest.mark.slow
def test_copies_of_experts_are_reduced_too(config: str) -> None:
    prediction = predicted(config, expert_parallel=4, replicas=2)
    reduced = kernels(prediction, "ncclDevKernel_all_reduce")
    sizes = Counter(each["args"]["Out msg nelems"] for each in reduced)
    # Of 16 ranks 8 have a copy, in which 2 have the same experts.
    assert sizes[OF_EXPERTS // 4 // 2 * 4] == MIXTURES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("experts", [1, 4])
def test_as_much_is_computed_wherever_experts_are(config: str, experts: int) -> None:
    """Two products in forward and four in backward, of all that tokens chose."""
    assert len(kernels(predicted(config, expert_parallel=experts), "bmm")) == 6 * MIXTURES


SIZES = {
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": INNER, "num_experts_per_tok": 2},
    # A shared expert that has a gate of its own.
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": INNER, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    # Biases, transposed weights, and a gate of another kind.
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": INNER, "moe_k": 2}
    | {"moe_layer_start_index": 0},
}
"""Mixtures of transformers that differ."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["standard", "deepep"])
def test_all_of_a_mixture_but_the_choice_stays(kind: str, backend: str, tmp_path: Path) -> None:
    """Of experts that are all the same, each token gets what one of them says, whatever it is."""
    config = write_config({"model_type": kind, **known_to(kind, SIZES | KINDS[kind])}, tmp_path)
    torch.manual_seed(0)
    model = model_of(config)().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3 or len(parameter) == EXPERTS:
                parameter.copy_(torch.randn_like(parameter[:1]).expand_as(parameter) / 4)
    spread = copy.deepcopy(model)
    assert len(spread_experts(spread, None, backend)) == 2
    for mine, its in zip(spread.parameters(), model.parameters(), strict=True):
        assert mine.shape == its.shape
        mine.data = its.data
    tokens = torch.randint(90, (2, 8))
    # Routers whose experts are equal still weigh them.
    torch.testing.assert_close(spread(tokens).logits, model(tokens).logits)


def test_the_head_dim_of_qwen_is_known(tmp_path: Path) -> None:
    """Its config does not declare it, and its model reads it."""
    sizes = known_to("qwen3_moe", SIZES | KINDS["qwen3_moe"])
    config = write_config({"model_type": "qwen3_moe", **sizes, "head_dim": 40}, tmp_path)
    with torch.device("meta"):
        assert model_of(config)().model.layers[0].self_attn.q_proj.out_features == 2 * 40


@pytest.mark.parametrize("kind", KINDS)
def test_experts_alone_are_spread(kind: str, tmp_path: Path) -> None:
    """In bfloat16, if they were."""
    config = write_config({"model_type": kind, **known_to(kind, SIZES | KINDS[kind])}, tmp_path)
    with torch.device("meta"):
        model, spread = model_of(config)().bfloat16(), model_of(config)().bfloat16()
        with fake_ranks(4):
            experts = spread_experts(spread, dist.group.WORLD)
    own = {id(p) for module in experts for p in module.parameters()}
    for mine, its in zip(spread.parameters(), model.parameters(), strict=True):
        ranks = 4 if id(mine) in own else 1
        assert (mine.shape[0] * ranks, mine.dtype) == (its.shape[0], its.dtype)


@pytest.mark.slow
def test_a_token_travels_once_to_a_rank(config: str) -> None:
    """With 2 experts of 4 ranks it goes to 1.75 ranks."""
    prediction = predicted(config, expert_parallel=4, expert_parallel_comm_backend="deepep")
    sent = kernels(prediction, "ncclDevKernel_all_to_all")
    assert {each["args"]["In msg nelems"] for each in sent} == {TOKENS * 7 // 4 * WIDTH * 2}


def test_a_larger_shared_expert_takes_longer(tmp_path: Path) -> None:
    """It is computed, too."""
    took = []
    for inner in (64, 1 << 16):
        sizes = {**SIZES, **KINDS["qwen2_moe"], "shared_expert_intermediate_size": inner}
        config = write_config({"model_type": "qwen2_moe", **known_to("qwen2_moe", sizes)}, tmp_path)
        took.append(predicted(config).compute)
    assert took[1] > 1.05 * took[0]
