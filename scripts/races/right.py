"""Runs right programs for GPUs, of others and ours, under ``fsdp-overlap races``, which must find
nothing in them but the faults of libraries that are known.

Prints a table. Exit status 1 if something else was found, or a program could not run. Some
programs need environments, which are made on first use, and torch's examples, which are cloned.

    python scripts/races/right.py --list
    python scripts/races/right.py --only fsdp2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = "https://github.com/pytorch/examples"
NEEDED = [
    "/distributed/",
    "/word_language_model/*.py",
    "/regression/",
    "/time_sequence_prediction/",
]
"""What of torch's examples is checked out."""

_SHARED = ["typer", "rich", "jinja2", "safetensors", "numpy"]
ENVIRONMENTS = {
    "peers": [
        *("torch==2.13.0", "megatron-fsdp==0.6.1", "deepspeed==0.19.8", "torchtitan==0.2.2"),
        *("triton", "transformers==5.23.0", "accelerate==1.15.0", "torchao==0.18.0"),
        *_SHARED,
    ],
    "torch-2.11": ["torch==2.11.0", "transformers==5.23.0", *_SHARED],
    "torch-newest": ["torch", "transformers==5.23.0", *_SHARED],
}
"""Requirements, by the environment's name. Others than these run in that of this script."""
BUILT_ON_TORCH = {"deepspeed", "megatron-fsdp"}
"""Whose installation imports torch."""


@dataclass(frozen=True)
class Right:
    """A program, and how it is run: ``target`` and ``args`` as for ``fsdp-overlap races``."""

    name: str
    origin: str
    target: str
    args: str = ""
    ranks: int | None = 4
    environment: str = ""
    options: str = ""
    texts: bool = False
    """Whether it reads ``train.txt``, ``valid.txt`` and ``test.txt`` in the folder ``{data}``."""

    fault: str = ""
    """Of a library, that is found in it: it is right as its user wrote it."""

    @property
    def needs_examples(self) -> bool:
        return self.target.startswith("{examples}")


def _ours(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "scripts/races", f"{{programs}}/{program}.py", args, **options)


def _users(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "tests", f"{{gpu_programs}}/{program}.py", args, **options)


def _documented(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "docs/examples", f"{{docs}}/{program}.py", args, **options)


def _torchs(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "pytorch/examples", f"{{examples}}/{program}.py", args, **options)


_PEERS_REAL: dict[str, Any] = {"environment": "peers", "options": "--real", "ranks": 2}

PROGRAMS = [
    # Plain torch
    _users("side stream", "side_stream", ranks=None),
    _users("prefetching loader", "prefetcher", ranks=None),
    _users("averages on a side stream", "ema", ranks=None),
    _users("activations on the host", "save_on_cpu", ranks=None),
    _users("asynchronous checkpoint", "async_checkpoint", ranks=None),
    _users("asynchronous checkpoint of DCP", "async_checkpoint", "dcp", ranks=None),
    _users("mixed precision with a scaler", "amp", ranks=None),
    _users("CUDA graph", "cuda_graph", ranks=None),
    _torchs(
        "LSTM",
        "word_language_model/main",
        "--accel --data {data} --epochs 1",
        ranks=None,
        texts=True,
    ),
    _torchs(
        "transformer",
        "word_language_model/main",
        "--accel --data {data} --epochs 1 --model Transformer --use-optimizer",
        ranks=None,
        texts=True,
    ),
    # DDP
    _users("DDP", "ddp"),
    _users("DDP with a communication hook", "ddp", "hook"),
    _users("DDP, gradients as views, accumulating", "ddp", "view accumulate"),
    _users("DDP with unused parameters", "ddp", "unused"),
    _torchs("DDP, torch's example", "distributed/ddp/example", ranks=2),
    _torchs("DDP, torch's tutorial", "distributed/ddp-tutorial-series/multigpu_torchrun", "2 1"),
    # FSDP
    _ours("FSDP1", "fsdp1"),
    _ours("FSDP1, mixed precision, original parameters", "fsdp1", "mixed original"),
    _ours("FSDP1, offloaded", "fsdp1", "offload"),
    _ours("FSDP1, hybrid", "fsdp1", "hybrid original"),
    _users("FSDP2", "fsdp2"),
    _users("FSDP2, mixed precision", "fsdp2", "mixed"),
    _users("FSDP2, offloaded", "fsdp2", "offload"),
    _users("FSDP2, HSDP", "fsdp2", "hsdp mixed"),
    _users("FSDP2 on torch 2.11", "fsdp2", "mixed", environment="torch-2.11"),
    _users("FSDP2 on the newest torch", "fsdp2", "mixed", environment="torch-newest"),
    _ours("FSDP2, experts", "experts", "fsdp2"),
    _ours("FSDP2, Llama", "llama", "--hidden 128", ranks=8),
    _torchs("FSDP2, torch's example", "distributed/FSDP2/example", ranks=8),
    _torchs(
        "FSDP2, explicit prefetch",
        "distributed/FSDP2/example",
        "--explicit-prefetching --mixed-precision",
        ranks=8,
    ),
    _torchs("tensor parallelism", "distributed/tensor_parallelism/tensor_parallel_example"),
    _torchs("sequence parallelism", "distributed/tensor_parallelism/sequence_parallel_example"),
    _torchs("FSDP2 and tensor parallelism", "distributed/tensor_parallelism/fsdp_tp_example"),
    # This library
    _ours("ours, flat", "sharded", "flat"),
    _ours("ours, blocks of rows", "sharded", "block mixed"),
    _ours("ours, whole tensors", "sharded", "tensor mixed"),
    _ours("ours, each tensor by itself", "sharded", "per-tensor mixed"),
    _ours("ours, HSDP", "sharded", "flat hsdp mixed"),
    _ours("ours, tensor parallel", "sharded", "block tensor-parallel"),
    _ours("ours, experts", "experts"),
    _ours("ours, Muon", "sharded", "tensor muon"),
    _ours("ours, offloaded", "sharded", "flat offload"),
    _ours("ours, quantized communication", "sharded", "block quantized mixed"),
    _ours("ours, accumulating, checkpointed", "sharded", "flat accumulate checkpoint mixed"),
    _ours("ours, ZeRO-1", "sharded", "flat zero1 mixed"),
    _ours("ours, ZeRO-2", "sharded", "flat zero2 accumulate mixed"),
    _ours("ours, Llama", "llama", "--hidden 128 --ours", ranks=8),
    _documented("ours, a whole training", "training", "--folder {data} --epochs 1"),
    _documented("ours, in half precision", "training", "--folder {data} --epochs 1 --half"),
    _documented("ours, transformers", "transformers_training", "--folder {data}"),
    _documented("ours, PEFT", "peft_training", "--folder {data} --steps 5"),
    _documented("ours, accelerate", "accelerate_training", "--folder {data} --epochs 1"),
    _documented("ours, Lightning", "lightning_training", "--folder {data} --epochs 1 --ranks 4"),
    _documented("ours, TRL", "trl_training", "--folder {data} --steps 5"),
    # Trainers of others
    _documented("PEFT on FSDP2", "peft_training", "--folder {data} --steps 5 --fsdp2"),
    _documented("TRL on FSDP2", "trl_training", "--folder {data} --steps 5 --fsdp2"),
    _documented(
        "TRL with LoRA on FSDP2", "trl_training", "--folder {data} --steps 5 --fsdp2 --lora"
    ),
    _ours("accelerate, DDP", "trainers", "accelerate"),
    _ours("accelerate, FSDP2", "trainers", "accelerate fsdp2 bf16"),
    _ours("transformers' Trainer, DDP", "trainers", "trainer bf16"),
    _ours("transformers' Trainer, FSDP2", "trainers", "trainer fsdp2 checkpoint"),
    _ours(
        "Lightning's Fabric, DDP",
        "trainers",
        "fabric clip",
        fault="makes DDP on a new stream, and uses parameters without waiting for their broadcast",
    ),
    _ours("Lightning's Fabric, FSDP1", "trainers", "fabric fsdp"),
    _ours("Lightning's Fabric, FSDP2", "trainers", "fabric fsdp2"),
    _ours("activations offloaded by TRL", "offloaded_activations"),
    _ours("torchao, optimizer on the host", "torchao_offload"),
    _ours("torchao, gradients on the host", "torchao_offload", "gradients"),
    _ours("torchao, AdamW in 8 bits on FSDP2", "torchao_offload", "adamw8bit fsdp2"),
    # Its shards are uneven, which ranks that do not exist cannot agree on.
    _ours("Megatron-FSDP", "megatron_fsdp_training", **_PEERS_REAL),
    _ours("Megatron-FSDP, ZeRO-2", "megatron_fsdp_training", "optim_grads", **_PEERS_REAL),
    _ours("Megatron-FSDP, ZeRO-1", "megatron_fsdp_training", "optim", **_PEERS_REAL),
    _ours(
        "Megatron-FSDP, double buffers",
        "megatron_fsdp_training",
        "double",
        **_PEERS_REAL,
        fault="overwrites a buffer of gradients on the stream of compute, which does not wait for "
        "their reduction: _enforce_double_buffer_limit() lets the stream of reductions wait",
    ),
    _ours("torchtitan", "torchtitan_trainer", environment="peers"),
    _ours(
        "torchtitan, HSDP",
        "torchtitan_trainer",
        "--parallelism.data_parallel_replicate_degree 2",
        environment="peers",
    ),
    _ours(
        "torchtitan, tensor parallel",
        "torchtitan_trainer",
        "--parallelism.tensor_parallel_degree 2",
        environment="peers",
    ),
    _ours(
        "torchtitan, experts",
        "torchtitan_trainer",
        "--model.name deepseek_v3 --model.flavor debugmodel --parallelism.expert_parallel_degree 2",
        environment="peers",
    ),
    _ours(
        "torchtitan, asynchronous checkpoint",
        "torchtitan_trainer",
        "--checkpoint.enable --checkpoint.interval 1 --checkpoint.async_mode async",
        **_PEERS_REAL,
    ),
    _ours("DeepSpeed, ZeRO-1", "deepspeed_zero", "1", environment="peers"),
    _ours("DeepSpeed, ZeRO-2", "deepspeed_zero", "2", environment="peers"),
    _ours("DeepSpeed, ZeRO-2, offloaded", "deepspeed_zero", "2 offload", environment="peers"),
    _ours("DeepSpeed, ZeRO-3", "deepspeed_zero", "3", environment="peers"),
]


@dataclass(frozen=True)
class Outcome:
    """What a run has shown. ``findings``: -1 if it could not run."""

    findings: int
    waits: int
    seconds: float
    not_seen: list[str]
    text: str
    """What it printed, if something was found or it could not run."""


def make_environment(name: str, folder: Path) -> Path:
    """Return the Python of an environment, which is made if it is not there."""
    python = folder / name / "bin" / "python"
    stamp = folder / f"{name}.inputs"  # written last
    requirements = ENVIRONMENTS[name]
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {python.parents[1]}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder / name], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    late = [each for each in requirements if each.partition("==")[0] in BUILT_ON_TORCH]
    subprocess.run(
        [*install, "setuptools", "wheel", "ninja", *(e for e in requirements if e not in late)],
        check=True,
    )
    if late:
        subprocess.run([*install, "--no-build-isolation", *late], check=True)
    stamp.write_text(wanted)
    return python


def clone_examples(folder: Path) -> Path:
    """Return torch's examples, which are cloned if they are not there."""
    examples = folder / "examples"
    if not (examples / "distributed").exists():
        clone = ["git", "clone", "--quiet", "--depth", "1", "--no-checkout"]
        subprocess.run([*clone, EXAMPLES, examples], check=True)
        git = ["git", "-C", str(examples)]
        subprocess.run([*git, "sparse-checkout", "set", "--no-cone", *NEEDED], check=True)
        subprocess.run([*git, "checkout", "--quiet"], check=True)
    return examples


def write_texts(folder: Path) -> None:
    """Write small texts for a model of words."""
    for name in ("train", "valid", "test"):
        lines = (f" the {n % 7} counts to {n % 5} and {n % 3} \n" for n in range(400))
        (folder / f"{name}.txt").write_text("".join(lines))


def run(program: Right, folder: Path, steps: int, seconds: float) -> Outcome:
    """Run ``program`` on the emulated device."""
    python = Path(sys.executable)
    if program.environment:
        python = make_environment(program.environment, folder)
    places = {
        "programs": str(HERE / "programs"),
        "gpu_programs": str(ROOT / "tests" / "support" / "gpu_programs"),
        "docs": str(ROOT / "docs" / "examples"),
        "examples": str(clone_examples(folder)) if program.needs_examples else "",
    }
    with tempfile.TemporaryDirectory() as data:
        if program.texts:
            write_texts(Path(data))
        places["data"] = data
        target = program.target.format(**places)
        found = Path(data, "found.json")
        command = [str(python), "-m", "fsdp_overlap.cli", "races"]
        command += [f"--steps={steps}", f"--json={found}", *program.options.split()]
        if program.ranks is not None:
            command.append(f"--ranks={program.ranks}")
        command += [target, *program.args.format(**places).split()]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=data if not program.needs_examples else Path(target).parent,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Outcome(-1, 0, seconds, [], f"not done in {seconds:.0f} s")
        took = time.perf_counter() - began
        told = json.loads(found.read_text()) if found.exists() else {"error": done.stdout}
    text = done.stdout if done.returncode else ""
    if told["error"]:
        return Outcome(-1, 0, took, [], text)
    not_seen = sorted(told["not_seen"])
    return Outcome(len(told["findings"]), len(told["waits"]), took, not_seen, text)


def row(program: Right, outcome: Outcome) -> str:
    """Return a row of the table."""
    where = program.origin + (f", {program.environment}" if program.environment else "")
    findings = "could not run" if outcome.findings < 0 else str(outcome.findings)
    if program.fault:
        findings += f": {program.fault}"
    cells = [program.name, where, findings, str(outcome.waits), f"{outcome.seconds:.0f}"]
    return f"| {' | '.join([*cells, ', '.join(outcome.not_seen)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="list the programs, and run none")
    parser.add_argument("--only", default="", help="run those whose names this regex finds")
    parser.add_argument("--environment", help="run those in this environment; '' is this one")
    parser.add_argument("--steps", type=int, default=3, help="of an optimizer, in each")
    parser.add_argument("--seconds", type=float, default=300, help="that a program may take")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fsdp_overlap_races")
    options = parser.parse_args()
    chosen = [
        program
        for program in PROGRAMS
        if re.search(options.only, program.name)
        and options.environment in (None, program.environment)
    ]
    if options.list:
        for program in chosen:
            print(f"{program.name}: {program.target} {program.args}".rstrip())
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    print("| program | from | findings | host waits per step | seconds | not seen |")
    print("|---|---|---|---|---|---|")
    wrong = 0
    for program in chosen:
        outcome = run(program, options.cache, options.steps, options.seconds)
        is_as_known = outcome.findings > 0 if program.fault else outcome.findings == 0
        wrong += not is_as_known
        print(row(program, outcome), flush=True)
        if outcome.text and not is_as_known:
            print(outcome.text, file=sys.stderr, flush=True)
    print(f"\n{len(chosen)} programs, {wrong} not as known")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
