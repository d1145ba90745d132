"""Which parameters Muon steps by default, in models of transformers and with heads of all kinds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_overlap.optim import Muon
from fsdp_overlap.optim.parameter_kinds import parameter_kinds

WIDTH, WORDS = 48, 100


def kinds_of(model: nn.Module) -> dict[str, set[str]]:
    """Return the names of each kind, without the numbers of blocks."""
    kinds: dict[str, set[str]] = {}
    for name, kind in parameter_kinds(model).items():
        kinds.setdefault(kind, set()).add(re.sub(r"\.\d+\.", ".*.", name))
    kinds.pop("vector", None)
    return kinds


ATTENTION = {f"model.layers.*.self_attn.{x}_proj.weight" for x in "qkvo"}
GATED = {f"model.layers.*.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"}
BERT = {f"attention.self.{x}.weight" for x in ("query", "key", "value")}
BERT |= {"attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight"}
BERT_EMBEDDINGS = {f"{x}_embeddings.weight" for x in ("word", "position", "token_type")}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], dict[str, set[str]]]] = {
    "Llama": (
        "LlamaConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 2},
        {
            "embedding": {"model.embed_tokens.weight"},
            "hidden matrix": ATTENTION | GATED,
            "output": {"lm_head.weight"},
        },
    ),
    "Llama, a classifier": (
        "LlamaConfig",
        "AutoModelForSequenceClassification",
        {"num_hidden_layers": 2, "num_labels": 3},
        {
            "embedding": {"model.embed_tokens.weight"},
            "hidden matrix": ATTENTION | GATED,
            "output": {"score.weight"},
        },
    ),
    "Gemma 3, a tied output": (
        "Gemma3TextConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 2},
        {"embedding": {"model.embed_tokens.weight"}, "hidden matrix": ATTENTION | GATED},
    ),
    "Mixtral": (
        "MixtralConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 2},
        {
            "embedding": {"model.embed_tokens.weight"},
            "hidden matrix": ATTENTION | EXPERTS,
            "router": {"model.layers.*.mlp.gate.weight"},
            "output": {"lm_head.weight"},
        },
    ),
    "GPT-OSS, experts with biases": (
        "GptOssConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 2},
        {
            "embedding": {"model.embed_tokens.weight"},
            "hidden matrix": ATTENTION | EXPERTS,
            "router": {"model.layers.*.mlp.router.weight"},
            "output": {"lm_head.weight"},
        },
    ),
    "Qwen3-Next, a shared expert of as many rows as experts": (
        "Qwen3NextConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 4, "num_experts": 512, "shared_expert_intermediate_size": 512},
        {
            "embedding": {"model.embed_tokens.weight"},
            "hidden matrix": ATTENTION
            | EXPERTS
            | {f"model.layers.*.mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
            | {
                f"model.layers.*.linear_attn.{x}.weight"
                for x in ("in_proj_qkvz", "in_proj_ba", "out_proj")
            },
            "router": {"model.layers.*.mlp.gate.weight"},
            "convolution": {"model.layers.*.linear_attn.conv1d.weight"},
            "output": {"lm_head.weight"},
        },
    ),
    "GPT-2, fused and transposed": (
        "GPT2Config",
        "AutoModelForSequenceClassification",
        {"n_layer": 2, "num_labels": 3},
        {
            "embedding": {"transformer.wte.weight", "transformer.wpe.weight"},
            "hidden matrix": {
                f"transformer.h.*.{x}.weight"
                for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            },
            "output": {"score.weight"},
        },
    ),
    "BERT, masked": (
        "BertConfig",
        "AutoModelForMaskedLM",
        {"num_hidden_layers": 2},
        {
            "embedding": {f"bert.embeddings.{x}" for x in BERT_EMBEDDINGS},
            "hidden matrix": {f"bert.encoder.layer.*.{x}" for x in BERT}
            | {"cls.predictions.transform.dense.weight"},
        },
    ),
    "RoBERTa, a classifier of two layers": (
        "RobertaConfig",
        "AutoModelForSequenceClassification",
        {"num_hidden_layers": 2, "num_labels": 3},
        {
            "embedding": {f"roberta.embeddings.{x}" for x in BERT_EMBEDDINGS},
            "hidden matrix": {f"roberta.encoder.layer.*.{x}" for x in BERT}
            | {"classifier.dense.weight"},
            "output": {"classifier.out_proj.weight"},
        },
    ),
    "T5, a tied output": (
        "T5Config",
        "AutoModelForSeq2SeqLM",
        {"num_layers": 2},
        {
            "embedding": {"shared.weight"}
            | {
                f"{x}.block.*.layer.*.SelfAttention.relative_attention_bias.weight"
                for x in ("encoder", "decoder")
            },
            "hidden matrix": {
                f"{side}.block.*.layer.*.{x}.weight"
                for side in ("encoder", "decoder")
                for x in [f"SelfAttention.{q}" for q in "qkvo"]
                + ["DenseReluDense.wi", "DenseReluDense.wo"]
            }
            | {f"decoder.block.*.layer.*.EncDecAttention.{q}.weight" for q in "qkvo"},
        },
    ),
    "ViT": (
        "ViTConfig",
        "AutoModelForImageClassification",
        {"num_hidden_layers": 2, "num_labels": 10},
        {
            "convolution": {"vit.embeddings.patch_embeddings.projection.weight"},
            "other": {"vit.embeddings.position_embeddings"},
            "hidden matrix": {f"vit.layers.*.attention.{x}_proj.weight" for x in "qkvo"}
            | {f"vit.layers.*.mlp.fc{n}.weight" for n in (1, 2)},
            "output": {"classifier.weight"},
        },
    ),
    "Swin, tables of positions": (
        "SwinConfig",
        "AutoModelForImageClassification",
        {"depths": [2, 2], "num_heads": [3, 6], "num_labels": 10},
        {
            "convolution": {"swin.embeddings.patch_embeddings.projection.weight"},
            "other": {
                "swin.encoder.layers.*.blocks.*.attention."
                "relative_position_bias.relative_position_bias_table"
            },
            "hidden matrix": {
                f"swin.encoder.layers.*.blocks.*.attention.{x}_proj.weight" for x in "qkvo"
            }
            | {f"swin.encoder.layers.*.blocks.*.mlp.fc{n}.weight" for n in (1, 2)}
            | {"swin.encoder.layers.*.downsample.reduction.weight"},
            "output": {"classifier.weight"},
        },
    ),
    "Mamba": (
        "MambaConfig",
        "AutoModelForCausalLM",
        {"num_hidden_layers": 2},
        {
            "embedding": {"backbone.embeddings.weight"},
            "convolution": {"backbone.layers.*.mixer.conv1d.weight"},
            "other": {"backbone.layers.*.mixer.A_log"},
            "hidden matrix": {
                f"backbone.layers.*.mixer.{x}_proj.weight" for x in ("in", "x", "dt", "out")
            },
        },
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, auto, options, expected = ARCHITECTURES[name]
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(getattr(transformers, config)(**options))
    assert kinds_of(model) == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)


IN_BLOCKS = {"blocks.*.qkv.weight", "blocks.*.out.weight"}


class Model(nn.Module):
    """Blocks, with the ``heads`` before or after them."""

    def __init__(self, first: bool = False, words: bool = True, **heads: nn.Module) -> None:
        super().__init__()
        if first:
            self.heads = nn.ModuleDict(heads)
        if words:
            self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        if not first:
            self.heads = nn.ModuleDict(heads)


def linear(outputs: int, inputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


@pytest.mark.parametrize("words", [True, False], ids=["whole", "last stage"])
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize(
    ("heads", "outputs", "hidden"),
    [
        ({"lm": linear(WORDS)}, {"lm.weight"}, set()),
        ({"padded": linear(128)}, {"padded.weight"}, set()),
        ({"lm": linear(WORDS), "more": linear(WORDS)}, {"lm.weight", "more.weight"}, set()),
        ({"lm": linear(WORDS), "classes": linear(7)}, {"lm.weight", "classes.weight"}, set()),
        ({"lm": linear(WORDS), "value": linear(1)}, {"lm.weight"}, set()),
        (
            {"deep": nn.Sequential(linear(WIDTH), nn.Tanh(), linear(7))},
            {"deep.2.weight"},
            {"deep.0.weight"},
        ),
        (
            {"wide": nn.Sequential(linear(90), nn.Tanh(), linear(7, 90))},
            {"wide.2.weight"},
            {"wide.0.weight"},
        ),
        (
            {"ahead": nn.ModuleList([linear(WORDS), linear(WORDS)])},
            {"ahead.0.weight", "ahead.1.weight"},
            set(),
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_heads(
    first: bool, words: bool, heads: dict[str, nn.Module], outputs: set[str], hidden: set[str]
) -> None:
    expected = {
        "hidden matrix": IN_BLOCKS | {f"heads.{name}" for name in hidden},
        "output": {f"heads.{name}" for name in outputs},
    }
    if words:
        expected["embedding"] = {"words.weight"}
    kinds: dict[str, set[str]] = {}
    for name, kind in parameter_kinds(Model(first, words, **heads)).items():
        kinds.setdefault(kind, set()).add(re.sub(r"blocks\.\d+\.", "blocks.*.", name))
    kinds.pop("vector")
    assert kinds == expected


@pytest.mark.parametrize("words", [WIDTH, 4 * WIDTH])
def test_a_head_with_as_many_rows_as_a_matrix_has_inputs(words: int) -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(words, WIDTH),
            "blocks": nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(2)
            ),
            "output": nn.Linear(WIDTH, words),
        }
    )
    kinds = parameter_kinds(model)
    assert kinds["output.weight"] == "output"
    assert kinds["blocks.0.0.weight"] == kinds["blocks.1.1.weight"] == "hidden matrix"


def test_a_head_that_is_tied_and_comes_first() -> None:
    model = Model(first=True, lm=linear(WORDS))
    model.heads["lm"].weight = model.words.weight
    assert kinds_of(model) == {"embedding": {"heads.lm.weight"}, "hidden matrix": IN_BLOCKS}


def test_a_head_of_the_vocabulary_in_a_block() -> None:
    """As DeepSeek's and Qwen's blocks that predict further tokens have."""
    model = Model()
    model.blocks[1].head = linear(WORDS)
    assert kinds_of(model)["output"] == {"blocks.*.head.weight"}


class Routed(nn.Module):
    """Experts in a list, or as a stack beside the router or in a module of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5)
        if where == "list":
            self.experts: Any = nn.ModuleList(
                nn.Sequential(linear(5), linear(48, 5)) for _ in range(5)
            )
        elif where == "beside":
            self.up = nn.Parameter(torch.ones(5, WIDTH, 32))
        else:
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.ones(5, WIDTH, 32))
            self.experts.up_bias = nn.Parameter(torch.ones(5, 32))


@pytest.mark.parametrize("where", ["list", "beside", "within"])
def test_routers(where: str) -> None:
    model = Model()
    model.blocks[0].mlp = Routed(where)
    kinds = kinds_of(model)
    assert kinds["router"] == {"blocks.*.mlp.router.weight"}
    experts = {
        "list": {f"blocks.*.mlp.experts.*.{n}.weight" for n in (0, 1)},
        "beside": {"blocks.*.mlp.up"},
        "within": {"blocks.*.mlp.experts.up"},
    }
    assert kinds["hidden matrix"] == IN_BLOCKS | experts[where]


def test_layers_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, bias=False)
    kinds = kinds_of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert kinds == {
        "hidden matrix": {
            f"layers.*.{x}"
            for x in ("self_attn.in_proj_weight", "self_attn.out_proj.weight")
            + ("linear1.weight", "linear2.weight")
        }
    }


def test_a_printed_optimizer_says_what_went_where() -> None:
    model = Model(lm=linear(WORDS))
    text = str(Muon(model, algorithms={"blocks.1.out.*": "adamw"}))
    table = [re.split(r"  +", line) for line in text.rpartition(")\n")[2].splitlines()]
    assert table == [
        ["algorithm", "kind", "parameters", "elements", "names"],
        ["muon", "hidden matrix", "3", "16,128", "blocks.*.qkv.weight, blocks.*.out.weight"],
        ["adamw", "hidden matrix", "1", "2,304", "blocks.*.out.weight"],
        ["adamw", "embedding", "1", "4,800", "words.weight"],
        ["adamw", "output", "1", "4,800", "heads.lm.weight"],
        [
            "adamw",
            "vector",
            "6",
            "288",
            "blocks.*.norm.weight, blocks.*.norm.bias, norm.weight, norm.bias",
        ],
    ]
    assert "algorithm: muon" in text
