"""Models of Hugging Face's transformers train, generate and are saved as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from twins import Twins
from zoo import ROWS, VOCABULARY

from fsdp_overlap import FsdpContext, find_blocks, fully_shard

pytest.importorskip("transformers")

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **ENDS))


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, **ENDS, **options))


def qwen3() -> nn.Module:
    """Its embedding is tied to its head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER, **ENDS, head_dim=8, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 8, "num_experts_per_tok": 1, "output_router_logits": True}
    experts["experts_implementation"] = "eager"  # the others know no double precision
    return MixtralForCausalLM(MixtralConfig(**DECODER, **ENDS, **experts))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0, **ENDS)
    )


MODELS = {"GPT-2": gpt2, "Llama": llama, "Qwen3": qwen3, "Mixtral": mixtral, "T5": t5}


def shard(model: Any, ctx: FsdpContext, **options: Any) -> None:
    for block in find_blocks(model):
        fully_shard(block, ctx, **options)
    fully_shard(model, ctx, **options)


class LabelledTwins(Twins):
    """Of models that compute their loss from labels."""

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.model(input_ids=self.mine(tokens), labels=self.mine(targets)).loss
        rows = zip(tokens.split(ROWS), targets.split(ROWS), strict=True)
        twin_losses = [self.twin(input_ids=mine, labels=wanted).loss for mine, wanted in rows]
        return loss, torch.stack(twin_losses).mean()


def train(name: str) -> None:
    LabelledTwins(MODELS[name], shard).train(2)


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_sharding(name: str) -> None:
    run_ranks(train, 2, name)
