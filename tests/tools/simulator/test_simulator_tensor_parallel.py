"""Tensor parallelism on emulated time: what is cut, what travels, and how much is computed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_overlap.tools.simulator import (
    Fsdp2Training,
    Prediction,
    Training,
)
from fsdp_overlap.tools.simulator.models import model_of
from fsdp_overlap.tools.simulator.plan_code import code_of
from fsdp_overlap.tools.simulator.tensor_parallel import parallelize
from support.predicted import GPUS, kernels, predict, write_config
from support.ranks import run_ranks

WIDTH, INNER, WORDS, BLOCKS, TOKENS = 32, 64, 96, 2, 256
CONFIG = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(CONFIG, tmp_path)


predicted = partial(predict, sequence=TOKENS)


def sent(prediction: Prediction, kind: str, nbytes: int) -> int:
    """How many collectives of ``kind`` there are whose full buffer has ``nbytes``."""
    which = "In" if kind == "reduce_scatter" else "Out"
    found = kernels(prediction, f"ncclDevKernel_{kind}")
    return Counter(each["args"][f"{which} msg nelems"] for each in found)[nbytes]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Training, Fsdp2Training])
def test_activations_travel_between_ranks_that_share_products(
    config: str, kind: type[Training]
) -> None:
    prediction = predicted(config, kind, tensor_parallel=4)
    whole = TOKENS * WIDTH * 2  # in bfloat16
    # Before attention and the layers behind it, and before the head; in backward again, for the
    # gradients of weights, of what was left cut. And gradients of what was summed are gathered.
    assert sent(prediction, "all_gather", whole) == 4 * BLOCKS + 2
    assert sent(prediction, "reduce_scatter", whole) == 4 * BLOCKS + 2
    assert sent(predicted(config, kind), "reduce_scatter", whole) == 0


def test_compute_waits_for_what_it_gets(config: str) -> None:
    """Each product follows its gather: none of these is hidden, for nothing else can be done."""
    prediction = predicted(config, tensor_parallel=4)
    gathers = kernels(prediction, "ncclDevKernel_all_gather")
    activations = [g for g in gathers if g["args"]["Out msg nelems"] == TOKENS * WIDTH * 2]
    products = kernels(prediction, "mm")
    for gather in activations:
        start, end = gather["ts"], gather["ts"] + gather["dur"]
        assert not [p for p in products if start < p["ts"] + p["dur"] / 2 < end]


def test_as_much_is_computed_by_all_together(config: str) -> None:
    alone, shared = predicted(config), predicted(config, tensor_parallel=4, micro_batch_size=4)
    assert len(kernels(shared, "mm")) == len(kernels(alone, "mm"))


@pytest.mark.slow
def test_products_that_are_shared_may_be_in_float8(tmp_path: Path) -> None:
    wide = CONFIG | {"hidden_size": 256, "intermediate_size": 512}
    config = write_config(wide, tmp_path)
    bfloat16, float8 = (
        predicted(config, tensor_parallel=4, linear_dtype=each) for each in (None, "float8")
    )
    assert len(kernels(float8, "_scaled_mm")) == 3 * 7 * BLOCKS
    assert len(kernels(float8, "_scaled_mm")) + 3 == len(kernels(bfloat16, "mm"))
    # All that blocks gather is cast before; the head's is not, nor what is reduced.
    whole = TOKENS * wide["hidden_size"]
    assert sent(float8, "all_gather", whole) == 4 * BLOCKS
    assert sent(float8, "all_gather", 2 * whole) == 2
    assert sent(float8, "reduce_scatter", 2 * whole) == 4 * BLOCKS + 2
    again = predicted(config, tensor_parallel=4, linear_dtype="float8", checkpointing="full")
    assert sent(again, "all_gather", whole) == 6 * BLOCKS


def test_one_layer_that_is_not_in_float8_leaves_gathers_in_bfloat16(tmp_path: Path) -> None:
    config = write_config(CONFIG | {"hidden_size": 256, "intermediate_size": 520}, tmp_path)
    prediction = predicted(config, tensor_parallel=4, linear_dtype="float8")
    assert len(kernels(prediction, "_scaled_mm")) == 3 * 4 * BLOCKS
    assert sent(prediction, "all_gather", TOKENS * 256) == 0


@pytest.mark.parametrize("tensor", [1, 4])
def test_each_rank_gathers_its_part_of_the_weights(config: str, tensor: int) -> None:
    of_block = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER
    norms = 2 * WIDTH  # of which all ranks have all
    whole = (of_block // tensor + norms) * 2
    aligned = 16 * GPUS // tensor
    size = -(-whole // aligned) * aligned
    # What forward has gathered last stays for backward.
    assert sent(predicted(config, tensor_parallel=tensor), "all_gather", size) == 2 * BLOCKS - 1


def test_tokens_are_those_of_a_gpu() -> None:
    alone = Training("llama3-8b", GPUS, micro_batch_size=4)
    shared = Training("llama3-8b", GPUS, micro_batch_size=4, tensor_parallel=8)
    assert shared.tokens == alone.tokens / 8


@pytest.mark.slow
def test_the_first_step_takes_no_more_memory_than_others(config: str) -> None:
    """DTensors try out how results will lie on tensors of the whole size. These have no memory."""
    first = predicted(config, tensor_parallel=4, micro_batch_size=8)
    again = predicted(config, tensor_parallel=4, micro_batch_size=8)
    assert first.memory == again.memory
    logits = 8 * TOKENS * WORDS * 4
    assert first.memory < 4 * logits


def losses(config: str) -> None:
    """``parallelize`` changes no result."""
    torch.manual_seed(0)
    model = model_of(config)()
    tokens = torch.randint(WORDS, (2, 8))
    expected = F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    parallelize(model, init_device_mesh("cpu", (2,)))
    with loss_parallel():
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    assert isinstance(loss, DTensor)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], msg=name)


@pytest.mark.slow
def test_a_model_that_is_cut_gives_the_same_losses_and_gradients(config: str) -> None:
    run_ranks(losses, 2, config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 3}, "256 is no multiple of 3"),
        ({"tensor_parallel": 32}, "16 is no multiple of 32"),
        ({"tensor_parallel": 8}, "num_key_value_heads=4 is no multiple"),
        ({"tensor_parallel": 2, "expert_parallel": 2}, "leave one of the two at 1"),
        ({"tensor_parallel": 8, "replicas": 4}, "2 is no multiple of 4"),
        ({"tensor_parallel": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(config: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predicted(config, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("other", ["mistral", "qwen2"])
def test_models_like_llama_are_cut_too(tmp_path: Path, other: str) -> None:
    prediction = predicted(
        write_config(CONFIG | {"model_type": other}, tmp_path), tensor_parallel=4
    )
    assert sent(prediction, "reduce_scatter", TOKENS * WIDTH * 2) == 4 * BLOCKS + 2


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "gpt_neox"},
        {"model_type": "qwen3", "num_key_value_heads": 4},
        {"tie_word_embeddings": True},
    ],
)
def test_models_that_are_not_like_llama_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    config = {name: size for name, size in CONFIG.items() if name != "num_key_value_heads"}
    path = write_config(config | other, tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel=4: .* is not cut"):
        predicted(path, tensor_parallel=4)


def test_a_model_of_others_is_refused() -> None:
    with pytest.raises(ValueError, match="Transformer is not cut"):
        predict("torch.nn:Transformer", tensor_parallel=2)


@pytest.mark.parametrize("replicate", [1, 2])
def test_the_code_of_a_plan_takes_a_mesh(replicate: int) -> None:
    code = code_of(Training("llama3-70b", 64, tensor_parallel=8, replicas=replicate))
    compile(code, "plan", "exec")
    names = '("shard",)' if replicate == 1 else '("replicate", "shard")'
    assert f"    mesh = grid[{names}]" in code
    assert "init_device_mesh" not in code
