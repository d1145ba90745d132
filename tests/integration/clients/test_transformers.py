"""Models of Hugging Face's transformers train, generate and are saved as without sharding."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_overlap import (
    FsdpContext,
    FSDPModule,
    MixedPrecisionPolicy,
    find_blocks,
    fully_shard,
    patch_fsdp2,
    register_fsdp_forward_method,
)
from fsdp_overlap.tensor.pytree import map_arguments, map_tensors
from fsdp_overlap.weights import load_weights
from fsdp_overlap.weights.safetensors_format import find_files
from support.ranks import run_ranks
from support.twins import Twins
from support.zoo import ROWS, VOCABULARY

# Imported by ranks alone, as it takes seconds.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before the time of a test counts."""
    run_ranks(importlib.import_module, 2, "transformers.generation", timeout=150)


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_sharding(name: str) -> None:
    run_ranks(train, 2, name)


def experts_of(model: Any, tokens: torch.Tensor) -> list[set[int]]:
    """Which experts of each layer get a token."""
    found: list[set[int]] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [
        gate.register_forward_hook(lambda *call: found.append({*call[-1][-1].flatten().tolist()}))
        for gate in gates
    ]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return found


def uneven_experts() -> None:
    twins = LabelledTwins(mixtral, shard)
    for tokens, targets in twins.batches(2):
        used = [experts_of(twins.twin, rows) for rows in tokens.split(ROWS)]
        assert any(first != second for first, second in zip(*used, strict=True))
        assert any(len(first | second) < 8 for first, second in zip(*used, strict=True))
        twins.backward(tokens, targets)
        twins.check_gradients()
        twins.check_rest()
        twins.step()
        twins.check_parameters()


def test_experts_may_get_tokens_on_one_rank_or_on_none() -> None:
    run_ranks(uneven_experts, 2)


def checkpointed(name: str, use_reentrant: bool) -> None:
    twins = LabelledTwins(MODELS[name], shard)
    tokens, targets = next(twins.batches(1))
    for is_on in (True, False, True):
        twins.model.train()
        if is_on:
            twins.model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        else:
            twins.model.activation_checkpointing_disable()
        twins.backward(tokens, targets)
        twins.check_gradients()
        twins.check_rest()
        twins.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    # A router's loss leaves a reentrant checkpoint without a graph.
    [("Llama", True), ("Llama", False), ("T5", True), ("T5", False), ("Mixtral", False)],
)
def test_activation_checkpointing_changes_nothing(name: str, use_reentrant: bool) -> None:
    run_ranks(checkpointed, 2, name, use_reentrant)


class InnerTwins(LabelledTwins):
    """Of models whose loss is of all that they return, also of what they keep for generation."""

    def losses(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = zip(tokens.split(ROWS), targets.split(ROWS), strict=True)
        twin_losses = [self.inner_loss(self.twin, *each) for each in rows]
        loss = self.inner_loss(self.model, self.mine(tokens), self.mine(targets))
        return loss, torch.stack(twin_losses).mean()

    def inner_loss(self, model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = dict.fromkeys(("use_cache", "output_hidden_states", "output_attentions"), True)
        out = model(input_ids=tokens, labels=targets, **wanted)
        hidden = out.get("hidden_states") or out.decoder_hidden_states
        attentions = out.get("attentions") or out.decoder_attentions
        cache = getattr(out.past_key_values, "self_attention_cache", out.past_key_values)
        inner = [hidden[1], attentions[0], attentions[1], cache.layers[0].keys]
        return out.loss + torch.stack([each.square().mean() for each in inner]).sum()


def inner(name: str) -> None:
    twins = InnerTwins(MODELS[name], shard)
    for model in (twins.model, twins.twin):
        model.set_attn_implementation("eager")  # also of a sharded model
    twins.train(2)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5"])
def test_hidden_states_attentions_and_caches_carry_gradients(name: str) -> None:
    run_ranks(inner, 2, name)


def grouped_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**DECODER, **ENDS, experts_implementation="grouped_mm"))


def half(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(7)
    ours, theirs = build(), build()
    theirs.load_state_dict(ours.state_dict())
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    of_root = MixedPrecisionPolicy(**policy, output_dtype=torch.float32)
    ctx = FsdpContext()
    for apply in (partial(fully_shard, ctx=ctx), fsdp2.fully_shard):
        model = theirs if apply is fsdp2.fully_shard else ours
        for block in find_blocks(model):
            apply(block, mp_policy=MixedPrecisionPolicy(**policy))
        apply(model, mp_policy=of_root)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (ours, theirs)]
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (ROWS, 5))
        mask = torch.ones_like(tokens)
        mask[0, :2] = 0
        outs = [m(input_ids=tokens, attention_mask=mask, labels=tokens) for m in (ours, theirs)]
        assert type(outs[0]) is type(outs[1])
        assert outs[0].logits.dtype is torch.float32
        assert torch.equal(outs[0].logits, outs[1].logits)
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), its.full_tensor()), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("build", [gpt2, llama, qwen3, grouped_mixtral])
def test_mixed_precision_is_fsdp2s_to_the_bit(build: Callable[[], nn.Module]) -> None:
    run_ranks(half, 2, build)


def generate(name: str, **options: Any) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    twin = copy.deepcopy(model)
    ctx = FsdpContext()
    shard(model, ctx)
    register_fsdp_forward_method(model, "generate")
    # Ranks need other numbers of forwards: of other lengths, and the first stops sooner.
    rank = dist.get_rank()
    tokens = torch.randint(3, VOCABULARY, (ROWS, 4 + rank))
    options.update(max_new_tokens=2 + 4 * rank, do_sample=False)
    with torch.no_grad():
        found = model.generate(tokens, **options)
    assert torch.equal(found, twin.generate(tokens, synced_gpus=False, **options))
    assert ctx.stats.current_full_buffers == 0


@pytest.mark.parametrize("name", MODELS)
def test_ranks_generate_what_they_would_alone(name: str) -> None:
    run_ranks(generate, 2, name)


def test_ranks_search_by_beams_as_they_would_alone() -> None:
    run_ranks(partial(generate, num_beams=2), 2, "Llama")


def generate_by_forwards() -> None:
    torch.manual_seed(1)
    model = llama().eval()
    twin = copy.deepcopy(model)
    shard(model, FsdpContext())
    tokens = torch.randint(3, VOCABULARY, (ROWS, 4))
    found = model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, twin.generate(tokens, max_new_tokens=3, do_sample=False))
    model, tokens = t5(), tokens[:1]
    shard(model, FsdpContext())
    with pytest.raises(
        RuntimeError, match=r"name another method that computes to register_fsdp_forward_method\(\)"
    ):
        model.generate(tokens)  # runs the encoder by itself


def test_decoders_generate_without_more_ado_and_encoders_say_what_they_need() -> None:
    run_ranks(generate_by_forwards, 2)


def generate_with_a_cache() -> None:
    """The cache is the caller's, and holds what the prompt was read with in another dtype."""
    from transformers import DynamicCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    torch.manual_seed(1)
    model = llama().eval()
    twin = copy.deepcopy(model).bfloat16()
    shard(model, FsdpContext(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    tokens = torch.randint(3, VOCABULARY, (ROWS, 6))
    for is_node in (False, True):
        if is_node:
            register_dynamic_cache_export_support()
        caches = []
        for each in (model, twin):
            cache = DynamicCache()
            with torch.no_grad():
                read = each(tokens[:, :3], past_key_values=cache, use_cache=True)
                assert read.past_key_values is cache
                if is_node and each is model:
                    for layer in cache.layers:
                        layer.keys, layer.values = layer.keys.float(), layer.values.float()
                each(tokens[:, 3:5], past_key_values=cache, use_cache=True)
            found = each.generate(
                tokens, past_key_values=cache, max_new_tokens=6, do_sample=False, min_new_tokens=6
            )
            caches.append((found, [layer.values for layer in cache.layers]))
        (mine, values), (its, expected) = caches
        assert torch.equal(mine, its)
        torch.testing.assert_close([each.bfloat16() for each in values], expected)


def test_a_cache_is_filled_as_without_sharding() -> None:
    run_ranks(generate_with_a_cache, 2)


def containers_of_transformers() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(logits=torch.ones(2), hidden_states=(torch.ones(1),))
    copied = map_tensors(lambda tensor: tensor.bfloat16(), output)
    assert type(copied) is CausalLMOutputWithPast
    assert copied.logits is copied["logits"] is copied[0]
    assert copied.hidden_states[0].dtype is torch.bfloat16
    assert list(copied) == list(output)
    batch = BatchEncoding({"x": torch.ones(2), "input_ids": torch.ones(1).int()})
    (mine,), _, arguments = map_arguments(lambda tensor: tensor.double(), (batch,), {})
    assert (type(mine), mine["x"].dtype) == (BatchEncoding, torch.float64)
    mine["y"] = mine["x"] + 1
    assert arguments is not None
    arguments.finish(None)
    assert (batch["y"].dtype, batch["x"].dtype) == (torch.float64, torch.float32)


def test_outputs_and_batches_of_transformers_are_cast_as_what_they_are() -> None:
    run_ranks(containers_of_transformers, 2)


def save(name: str, folder: str) -> None:
    from transformers import AutoConfig

    torch.manual_seed(1)
    model = MODELS[name]()
    whole = copy.deepcopy(model)
    shard(model, FsdpContext())
    assert type(model).__name__ == f"FSDP{type(whole).__name__}"
    with pytest.raises(RuntimeError, match=r"RaggedDTensor|shared tensors"):
        model.save_pretrained(f"{folder}/sharded")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() > 0:
        return
    model.save_pretrained(folder, state_dict=full)
    assert AutoConfig.from_pretrained(folder).architectures == [type(whole).__name__]
    for cls in (type(whole), type(model)):
        loaded = cls.from_pretrained(folder)
        assert type(loaded) is type(whole)
        expected = whole.state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["Qwen3", "Mixtral", "T5"])
def test_what_is_saved_is_loaded_by_from_pretrained(name: str, tmp_path: Path) -> None:
    run_ranks(save, 2, name, str(tmp_path))


def load_into_shards(name: str, folder: str, max_bytes: int) -> None:
    """Into a model on the meta device: stacked experts, ties and rotary buffers as by
    ``from_pretrained``."""
    from transformers import AutoConfig

    torch.manual_seed(1)
    plain: Any = MODELS[name]().float().eval()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder, max_shard_size=max_bytes)
    dist.barrier()
    assert len(find_files(Path(folder))) > 2
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    with torch.device("meta"):
        model: Any = type(plain)(config).eval()
    shard(model, FsdpContext())
    loaded = load_weights(model, folder)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert loaded.nbytes <= 1.05 * held
    weights = dict(plain.named_parameters())
    for key, one in model.named_parameters():
        assert torch.equal(one.full_tensor(), weights.pop(key)), key
    assert not weights
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    inputs = {"decoder_input_ids": tokens} if name == "T5" else {}
    reference = type(plain).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        scores, wanted = (each(input_ids=tokens, **inputs).logits for each in (model, reference))
    assert torch.equal(scores, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_files_are_loaded_into_shards(name: str, tmp_path: Path) -> None:
    run_ranks(load_into_shards, 2, name, str(tmp_path), 4000)


def load_onto_mesh(name: str, folder: str, replicas: int) -> None:
    """Train, generate, save whole and distributed, and go on from either, as on FSDP2."""
    import transformers.distributed.fsdp as of_transformers
    from transformers.distributed import DistributedConfig
    from transformers.distributed.checkpoint import (
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(1)
    plain: Any = MODELS[name]().float()
    plain.config.output_router_logits = False  # a loss that is no mean over ranks
    if rank == 0:
        plain.save_pretrained(f"{folder}/start")
    dist.barrier()

    def load(kind: str) -> tuple[Any, torch.optim.Optimizer]:
        config = DistributedConfig(fsdp_size=ranks // replicas, dp_replicate_size=replicas)
        path = f"{folder}/{kind}"
        model: Any = type(plain).from_pretrained(path, distributed_config=config)
        assert isinstance(model, FSDPModule)
        return model.train(), torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def check(model: Any) -> None:
        for (key, one), other in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert key == other[0]
            torch.testing.assert_close(one.full_tensor(), other[1], rtol=1e-4, atol=1e-5)

    with patch_fsdp2(), patch.object(of_transformers, "fully_shard", fsdp2.fully_shard):
        model, optimizer = load("start")
        its = torch.optim.AdamW(plain.train().parameters(), lr=0.01, eps=1e-3)
        tokens = torch.randint(3, VOCABULARY, (4, ranks, 6))
        for batch in tokens[:3]:
            step(model, optimizer, batch[rank : rank + 1])
            step(plain, its, batch)
        check(model)
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
        prompt = tokens[0, rank : rank + 1, :3]
        with torch.no_grad():
            written = [each.eval().generate(prompt, **options) for each in (model, plain)]
        assert torch.equal(*written)
        model.save_pretrained(f"{folder}/whole")
        model.save_pretrained(f"{folder}/parts", distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")
        step(plain.train(), its, tokens[3])
        for kind in ("whole", "parts"):
            model, optimizer = load(kind)
            load_optimizer_distributed(model, optimizer, f"{folder}/optimizer")
            step(model, optimizer, tokens[3, rank : rank + 1])
            check(model)


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"),
    [
        ("Qwen3", 2, 1),
        pytest.param("Llama", 2, 1, marks=pytest.mark.slow),
        pytest.param("Mixtral", 2, 1, marks=pytest.mark.slow),
        pytest.param("Mixtral", 4, 1, marks=pytest.mark.slow),
        pytest.param("Qwen3", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_models_that_transformers_loads_onto_a_mesh_train_as_unsharded(
    name: str, ranks: int, replicas: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers.distributed.mixin", reason="an older transformers")
    run_ranks(load_onto_mesh, ranks, name, str(tmp_path), replicas, timeout=120)


def start_on_meta(name: str) -> None:
    with torch.device("meta"):
        model, whole = MODELS[name](), MODELS[name]()
    shard(model, FsdpContext())
    for each in (model, whole):
        each.to_empty(device="cpu")
        for buffer in each.buffers():
            buffer.zero_()
        if each is whole:
            each.tie_weights()  # which its to_empty() undid
        torch.manual_seed(9)
        each.init_weights()
    for (fqn, parameter), expected in zip(
        model.named_parameters(), whole.parameters(), strict=True
    ):
        assert torch.equal(parameter.full_tensor(), expected), fqn
    for (fqn, buffer), expected in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, expected), fqn
    tokens = torch.randint(VOCABULARY, (ROWS, 4))
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, whole)]
    assert torch.equal(*losses)
    losses[0].backward()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_starts_on_meta_is_initialized_as_any(name: str) -> None:
    run_ranks(start_on_meta, 2, name)


def resize() -> None:
    model = qwen3()
    model.resize_token_embeddings(VOCABULARY + 3)
    twins = LabelledTwins(lambda: model, shard)
    twins.train(1)
    assert twins.model.lm_head.weight is twins.model.model.embed_tokens.weight
    twins.model.tie_weights()
    twins.train(1)
    assert twins.model.num_parameters() == twins.twin.num_parameters()
    with pytest.raises(RuntimeError, match="the data of a RaggedDTensor of"):
        twins.model.resize_token_embeddings(VOCABULARY)


def test_embeddings_are_resized_before_sharding_and_stay_tied() -> None:
    run_ranks(resize, 2)


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {key: DECODER[key] for key in list(DECODER)[:5]}
    return BertForMaskedLM(BertConfig(**sizes))


def bert_without_head() -> nn.Module:
    return bert().bert


BLOCKS = {
    gpt2: "transformer.h.0 transformer.h.1",
    llama: "model.layers.0 model.layers.1",
    mixtral: "model.layers.0 model.layers.1",
    t5: "encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.1",
    # It names its embeddings too, which are tied to the head.
    bert: "bert.encoder.layer.0 bert.encoder.layer.1",
    bert_without_head: "embeddings encoder.layer.0 encoder.layer.1",
}


def blocks_of(build: Callable[[], nn.Module]) -> str:
    model = build()
    names = {module: name for name, module in model.named_modules()}
    return " ".join(names[block] for block in find_blocks(model))


@pytest.mark.parametrize("build", BLOCKS)
def test_blocks_are_those_that_the_model_names(build: Callable[[], nn.Module]) -> None:
    assert run_ranks(blocks_of, 1, build) == [BLOCKS[build]]
