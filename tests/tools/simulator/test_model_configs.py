"""Config files as hubs ship them: what is read of them, what is noted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fsdp_overlap.tools.simulator.model_configs import ModelError, read_config
from fsdp_overlap.tools.simulator.models import model_of, unread_keys
from support.cli_runs import run_main
from support.pages import TESTS
from support.predicted import kernels, predict, write_config

HUB: dict[str, tuple[int, dict[str, Any]]] = json.loads(
    (TESTS / "support" / "hub_configs.json").read_bytes()
)
"""By name the number of parameters, and the config.json with its older and additional keys. The
numbers are hubs', but for parameters that are buffers in transformers, or that it does not load."""
ENCODERS = {"albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert"}
ENCODERS |= {"mpnet", "roberta", "xlm-roberta"}
SIZES = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of_hub(name: str, folder: Path, **changed: Any) -> str:
    return write_config(HUB[name][1] | changed, folder)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_table_has_forty_families() -> None:
    assert len({config["model_type"] for _, config in HUB.values()}) >= 40


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", HUB)
def test_models_of_hubs_have_as_many_parameters_as_transformers_makes(
    name: str, tmp_path: Path
) -> None:
    path = of_hub(name, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    is_encoder = config.model_type in ENCODERS
    maker = transformers.AutoModelForMaskedLM if is_encoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        assert count(model_of(path)()) == count(maker.from_config(config)) == HUB[name][0]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bert-base-uncased", ["gradient_checkpointing", "position_embedding_type"]),
        ("gemma-3-1b", []),
        ("gpt2", ["n_ctx", "task_specific_params"]),
        ("gpt-oss-20b", ["experts_per_token", "initial_context_length"]),
        ("llama-3.1-8b", ["unsloth_fixed"]),
        ("mistral-7b-v0.1", []),
        (
            "modernbert-base",
            [
                "gradient_checkpointing",
                "layer_norm_eps",
                "position_embedding_type",
                "reference_compile",
                "repad_logits_with_grad",
            ],
        ),
    ],
)
def test_keys_are_unread_that_neither_configs_nor_models_read(
    name: str, keys: list[str], tmp_path: Path
) -> None:
    assert unread_keys(of_hub(name, tmp_path)) == keys


def test_unread_keys_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(SIZES | {"zzz": 1, "max_sequence_length": 64, "temperature": 1}, tmp_path)
    assert run_main("simulate", path, "--sequence", "128") == 0
    assert "keys that nothing reads  max_sequence_length, zzz\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changed", "types"),
    [
        ("gemma-3-1b", {}, "sssssfsssssfsssssfsssssfss"),
        ("gemma-3-1b", {"sliding_window_pattern": 2, "num_hidden_layers": 4}, "sfsf"),
        ("command-r7b-12-2024", {"num_hidden_layers": 4}, "sssf"),
        ("gemma-2-9b", {"num_hidden_layers": 4}, "sfsf"),
        ("modernbert-base", {"num_hidden_layers": 4}, "fssf"),
        ("modernbert-base", {"num_hidden_layers": 4, "global_attn_every_n_layers": 2}, "fsfs"),
        ("qwen2.5-7b", {"num_hidden_layers": 4}, "ffff"),
        (
            "qwen2.5-7b",
            {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3},
            "fffs",
        ),
    ],
)
def test_layers_have_windows_where_transformers_says(
    name: str, changed: dict[str, Any], types: str, tmp_path: Path
) -> None:
    config, _ = read_config(Path(of_hub(name, tmp_path, **changed)))
    known = {"s": "sliding_attention", "f": "full_attention"}
    assert config.layer_types == [known[each] for each in types]
    assert config.layer_types == transformers.AutoConfig.from_pretrained(tmp_path).layer_types


@pytest.mark.slow
def test_windows_are_predicted_where_the_pattern_has_them(tmp_path: Path) -> None:
    """A kernel with a mask for each layer with a window, one without for others."""
    config = SIZES | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32}
    for pattern, windows in ((2, 2), (4, 3)):
        path = write_config(config | {"sliding_window_pattern": pattern}, tmp_path)
        found = predict(path, sequence=128)
        assert len(kernels(found, "_scaled_dot_product_efficient_attention")) == windows
        assert len(kernels(found, "_scaled_dot_product_flash_attention")) == 4 - windows


MISSPELLED = {
    "hidden_sizes": "hidden_size",
    "vocabulary_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_kv_head": "num_key_value_heads",
    "rope_thta": "rope_theta",
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_key_that_looks_like_one_that_is_missing_is_an_error(name: str, tmp_path: Path) -> None:
    meant = MISSPELLED[name]
    config = {key: value for key, value in SIZES.items() if key != meant} | {name: 4}
    with pytest.raises(ModelError, match=rf"does not read {name} \(did you mean {meant}\?\)"):
        read_config(Path(write_config(config, tmp_path)))
    if meant in SIZES:
        assert unread_keys(write_config(config | {meant: SIZES[meant]}, tmp_path)) == [name]


def test_older_names_are_what_a_misspelling_may_mean(tmp_path: Path) -> None:
    path = write_config(
        SIZES | {"model_type": "gemma3_text", "sliding_window_patern": 2, "head_dim": 16}, tmp_path
    )
    with pytest.raises(ModelError, match=r"did you mean sliding_window_pattern\?"):
        model_of(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, and must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must"),
        ({"hidden_size": -64}, "hidden_size is -64, and must"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"model_type": "falcon", "num_kv_heads": 3}, "num_kv_heads 3 does not divide"),
        ({"model_type": "qwen2", "hidden_size": 66}, "hidden_size 66 is no multiple of num_att"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer is 0, and must be at least 1"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, and must"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "pattern is 0, and must"),
        (
            {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3, of num_experts 2",
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 0},
            "num_experts_per_tok is 0, of n_routed_experts 8",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3},
            "(4) must be equal to the number of `layer_types` (3)",
        ),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        model_of(write_config(SIZES | changed, tmp_path))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen2", "hidden_size": 66, "head_dim": 16},
        # As transformers saves it where no layer has a window.
        {"model_type": "qwen2_moe", "sliding_window": 0},
        {"model_type": "ctrl", "from_tf": False},
    ],
)
def test_sizes_that_do_not_matter_may_be_any(changed: dict[str, Any], tmp_path: Path) -> None:
    read_config(Path(write_config(SIZES | changed, tmp_path)))
