"""`fsdp-overlap simulate`: models, options, what it prints and writes, and what it refuses."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest
import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap.tools.profiling import read_report
from fsdp_overlap.tools.profiling.drawing import COLORS
from fsdp_overlap.tools.profiling.plot import write_png
from fsdp_overlap.tools.simulator import Costs, Device, Fabric, Prediction, Training, simulate
from fsdp_overlap.tools.simulator.models import model_of
from fsdp_overlap.tools.simulator.training import CHECKPOINTING
from support.cli_runs import run_main
from support.predicted import known_to

WIDTH, BLOCKS, VOCABULARY = 64, 4, 100
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}


def saved(folder: Path, kind: str, **options: Any) -> Path:
    """The config of an architecture, as transformers writes it, with those options it has."""
    options = known_to(kind, options)
    config = transformers.CONFIG_MAPPING[kind](**options, bos_token_id=1, eos_token_id=2)
    config.save_pretrained(folder)
    return folder / "config.json"


class Tiny(nn.Module):
    """Of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Long(Tiny):
    """Of so many blocks that their collectives are a line in a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(copy.deepcopy(self.layers[0]) for _ in range(16 * BLOCKS))


TINY, LONG = f"{__name__}:Tiny", f"{__name__}:Long"


def predicted(**options: Any) -> Prediction:
    training = Training(**{"model": TINY, "gpus": 8, "sequence": 128, **options})
    costs = Costs(Device.read("h100_sxm"), Fabric.read("nvlink4_400g"))
    return simulate(training.program, training.gpus, costs)


def gathers(prediction: Prediction) -> int:
    return sum(each.kind == "all_gather" for each in prediction.report.collectives)


def gathered(prediction: Prediction) -> int:
    """Bytes, but for what shards say of themselves."""
    found = prediction.report.collectives
    return sum(each.nbytes or 0 for each in found if each.kind == "all_gather")


def reductions(prediction: Prediction) -> int:
    return sum(each.kind == "reduce_scatter" for each in prediction.report.collectives)


@pytest.mark.slow
def test_options_do_what_they_say() -> None:
    plain = predicted()
    # Of the blocks and the root, the last block is kept for backward, and the root is whole.
    assert (gathers(plain), reductions(plain)) == (2 * BLOCKS, BLOCKS + 1)
    paired = predicted(blocks_per_unit=2)
    assert reductions(paired) == BLOCKS // 2 + 1
    twice = predicted(microbatches=2)
    assert reductions(twice) == BLOCKS + 1
    assert gathers(twice) > gathers(plain)
    kept = predicted(microbatches=2, stage=2)
    assert gathers(kept) < gathers(twice)
    assert kept.memory > twice.memory
    copies = predicted(replicas=4)
    kinds = {event["name"] for event in copies.trace["traceEvents"]}
    assert "ncclDevKernel_all_reduce" in kinds
    in_8_bits = predicted(gather_dtype=torch.float8_e4m3fn)
    assert gathered(in_8_bits) < 0.6 * gathered(plain)


def test_what_runs_again_takes_time_and_no_memory() -> None:
    kinds = [predicted(checkpointing=kind, sequence=65536) for kind in CHECKPOINTING]
    assert list(CHECKPOINTING) == ["none", "selective", "full"]
    memory, seconds = [each.memory for each in kinds], [each.seconds for each in kinds]
    assert sorted(memory, reverse=True) == memory
    assert memory[2] < 0.8 * memory[0]
    assert sorted(seconds) == seconds
    assert seconds[2] > 1.1 * seconds[0]


def test_more_gpus_take_longer_and_less_memory() -> None:
    found = [predicted(gpus=gpus, sequence=4096) for gpus in (8, 64, 1024)]
    seconds = [each.seconds for each in found]
    assert sorted(seconds) == seconds
    assert found[1].memory < found[0].memory


@pytest.mark.slow
def test_what_is_hidden_is_drawn_as_hidden(tmp_path: Path) -> None:
    """Kernels have gaps, which no picture of a step can show."""
    report = read_report(predicted(model=LONG, sequence=65536).trace, steps=1)
    write_png({"": report}, tmp_path / "overlap.png")
    pixels = matplotlib.image.imread(tmp_path / "overlap.png")[..., :3]
    below = pixels[len(pixels) // 3 :]  # without the legend
    exposed, hidden = (
        int((abs(below - matplotlib.colors.to_rgb(COLORS[what])) < 0.1).all(-1).sum())
        for what in ("exposed", "hidden")
    )
    found = report.ranks[0].collectives
    share = sum(each.exposed for each in found) / sum(each.duration for each in found)
    assert 0 < share < 0.5
    assert abs(exposed / (exposed + hidden) - share) < 0.1


@pytest.mark.slow
def test_a_config_of_transformers_is_predicted_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    options = "--gpus 64 --sequence 128 --out"
    assert run_main("simulate", str(config), *options.split(), str(out)) == 0
    shown = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in model_of(str(config))().parameters())
    assert f"{count:,} (num_hidden_layers {BLOCKS}, hidden_size {WIDTH}, vocab_size" in shown
    assert "tokens a second and GPU" in shown
    assert "forward all-gathers" in shown
    trace = json.loads(gzip.decompress((out / "rank0.json.gz").read_bytes()))
    assert trace["distributedInfo"]["world_size"] == 64
    assert (out / "overlap.html").exists()
    assert run_main("report", str(out / "rank0.json.gz")) == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", SIZES | {"num_key_value_heads": 2}),
        ("mixtral", SIZES | EXPERTS | {"num_key_value_heads": 2}),
        ("deepseek_v2", SIZES | EXPERTS),
        ("gpt_oss", SIZES | EXPERTS | {"head_dim": 16, "num_key_value_heads": 2}),
        ("gemma2", SIZES | {"head_dim": 16, "num_key_value_heads": 2}),
        ("gpt2", GPT),
        ("gpt_neox", SIZES),
        ("bloom", GPT | {"hidden_size": WIDTH}),
        ("falcon", SIZES),
        ("opt", SIZES | {"ffn_dim": WIDTH, "word_embed_proj_dim": WIDTH}),
        ("mamba2", SIZES | {"num_heads": 8, "head_dim": 16, "state_size": 16}),
        ("distilbert", {"dim": WIDTH, "hidden_dim": WIDTH, "n_layers": 2, "n_heads": 4}),
    ],
)
def test_configs_that_transformers_saved_are_predicted(
    kind: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, kind, **options)
    assert run_main("simulate", str(path), "--sequence", "128") == 0
    assert "tokens a step and GPU    128\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("t5", {"d_model": WIDTH}, "has an encoder and a decoder"),
        ("whisper", {"d_model": WIDTH}, "has an encoder and a decoder"),
        ("gemma3", {"text_config": SIZES}, "the model of its text_config can be predicted"),
        ("clip", {}, "takes more than tokens. What"),
        ("vit", {}, "vit is no language model"),
        ("mamba", {"num_hidden_layers": 2, "hidden_size": WIDTH}, "runs token by token"),
        # Its mask depends on values.
        ("biogpt", SIZES, "cannot be predicted: RuntimeError: the program depends on a value"),
    ],
)
def test_other_configs_are_refused_in_a_line(
    kind: str,
    options: dict[str, Any],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path, kind, **options)
    assert run_main("simulate", str(path), "--sequence", "128") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert str(path) in said[0]
    assert why in said[0]
    assert "What can be predicted: decoders such as llama" in said[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "lama"}', "has no model_type 'lama'; did you mean llama?"),
        ('{"model_type": "lama", "auto_map": {}}', "the code that auto_map names is not run; what"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "is no config of llama: "),
        (
            '{"model_type": "llama", "hidden_sizes": 64, "zzz": 1, "temperature": 0.5}',
            "does not read hidden_sizes (did you mean hidden_size?); correct or",
        ),
    ],
)
def test_files_that_are_no_configs_are_said(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert run_main("simulate", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "config.json") in error
    assert said in error


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "options", "positions"),
    [
        ("gpt2", GPT, 1024),
        ("llama", SIZES | {"max_position_embeddings": 96}, 96),
        ("roberta", SIZES | {"max_position_embeddings": 130}, 128),
    ],
)
def test_sequences_are_as_long_as_the_model_has_positions(
    kind: str,
    options: dict[str, Any],
    positions: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path, kind, **options)
    assert run_main("simulate", str(path)) == 0
    assert f"tokens a step and GPU    {positions}\n" in capsys.readouterr().out
    assert run_main("simulate", str(path), "--sequence", str(positions + 1)) == 2
    assert f"has {positions} positions" in capsys.readouterr().err


class Positions(Tiny):
    """Learned ones, of which no config tells."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(96, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return super().forward(tokens) + self.head(self.positions(at))


def test_positions_that_are_missing_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{__name__}:Positions"
    assert run_main("simulate", model, "--sequence", "96") == 0
    assert run_main("simulate", model, "--sequence", "97") == 2
    assert "an embedding of 96 rows has no row 96 (" in capsys.readouterr().err


def fails() -> nn.Module:
    raise KeyError("two\nlines")


def traced(model: nn.Module, path: Path) -> Path:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(torch.zeros(1, 32, dtype=torch.int64)).sum().backward()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.mark.slow
def test_a_profile_is_of_the_model_that_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, head = Tiny(), Tiny()
    head.head = nn.Linear(WIDTH, VOCABULARY + 1)
    deeper = Tiny()
    deeper.layers.extend(Tiny().layers)
    wide = nn.Sequential(nn.Embedding(VOCABULARY, 48), nn.Linear(48, VOCABULARY))
    for model, code in ((own, 0), (deeper, 0), (head, 2), (wide, 2)):
        trace = str(traced(model, tmp_path / "trace.json"))
        assert run_main("simulate", TINY, "--profile", trace, "--sequence", "128") == code
        assert ("the profile is of another model" in capsys.readouterr().err) == bool(code)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"{__name__}:fails"], r"fails cannot be predicted: KeyError: 'two\nlines' (test_simu"),
        ([f"{__name__}:dict"], "module 'test_simulate_command' has no attribute 'dict'"),
        (
            ["llama9"],
            "there is no model 'llama9': give one of deepseek-v3, llama3-405b, llama3-70b",
        ),
        (["llama3-8b", "--device", "h1000"], "h100_sxm"),
        (["llama3-8b", "--gpus", "8", "--replicas", "3"], "8 GPUs cannot hold 3 copies"),
        (
            ["llama3-8b", "--expert-parallel", "3"],
            "8 GPUs that hold one copy cannot share experts 3 by 3",
        ),
        ([TINY, "--expert-parallel", "2"], "has no mixture of experts"),
        (
            ["moonlight-16b", "--gpus", "6", "--expert-parallel", "6"],
            "64 experts cannot be spread over 6",
        ),
        (
            ["moonlight-16b", "--sequence", "100"],
            "100 tokens for 6 experts each cannot be balanced",
        ),
        (["llama3-8b", "--gpus", "0"], "gpus=0: must be at least 1"),
        (["no_such:model"], "model 'no_such:model': No module named 'no_such'"),
        ([TINY, "--stage", "7"], "set_zero_stage(7): use 1, 2 or 3"),
        ([TINY, "--profile", "no_such.json"], "no_such.json cannot be read as a trace"),
        ([TINY, "--best", "--against-fsdp2"], "--best and --against-fsdp2: leave one of the two"),
        (["llama3-8b", "--layout", "round"], "must be one of flat, per-tensor, tensor-atomic"),
        (["llama3-8b", "--optimizer", "sgd"], "optimizer='sgd': must be one of adamw, torch-"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("simulate", *arguments) == 2
    assert said in capsys.readouterr().err
