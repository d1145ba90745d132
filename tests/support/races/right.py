"""Runs right programs for GPUs, of others and ours, under ``fsdp-overlap races``, which must find
nothing in them but the faults of libraries that are known.

Prints a table. Exit status 1 if something else was found, or a program was not run.

    python tests/support/races/right.py --list
    python tests/support/races/right.py --only fsdp2
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import HERE, ROOT, Environment, Found, NotRun, add_cache, fill, find_races

EXAMPLES = "https://github.com/pytorch/examples"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
NEEDED = ["/distributed/", "/word_language_model/*.py"]
"""What of torch's examples is checked out."""

OWN = Environment()
TORCH_211, TORCH_NEWEST = Environment(torch="2.11.0"), Environment(torch="2.15.0")
MEGATRON_FSDP = Environment(("megatron-fsdp==0.6.1", "einops==0.8.2", "packaging==26.4"))
DEEPSPEED = Environment(("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4"))
TORCHTITAN = Environment(
    (
        *("torchtitan==0.2.2", "absl-py==2.5.1", "docstring-parser==0.18.0", "protobuf==7.36.2"),
        *("tensorboard==2.21.0", "torchdata==0.11.0", "triton==3.7.1", "typeguard==4.6.1"),
        "tyro==1.0.17",
    )
)


@dataclass(frozen=True)
class Right:
    """A program, and how it is run: ``target`` and ``args`` as for ``fsdp-overlap races``."""

    name: str
    origin: str
    target: str
    args: str = ""
    ranks: int | None = 4
    environment: Environment = OWN
    options: str = ""
    texts: bool = False
    """Whether it reads ``train.txt``, ``valid.txt`` and ``test.txt`` in the folder ``{data}``."""

    fault: str = ""
    """Of a library, that is found in it: it is right as its user wrote it."""

    @property
    def needs_examples(self) -> bool:
        return self.target.startswith("{examples}")


def _ours(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "tests/support/races", f"{{programs}}/{program}.py", args, **options)


def _users(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "tests", f"{{gpu_programs}}/{program}.py", args, **options)


def _documented(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "docs/examples", f"{{docs}}/{program}.py", args, **options)


def _torchs(name: str, program: str, args: str = "", **options: Any) -> Right:
    return Right(name, "pytorch/examples", f"{{examples}}/{program}.py", args, **options)


_REAL: dict[str, Any] = {"options": "--real", "ranks": 2}

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
    _users("FSDP2 on torch 2.11", "fsdp2", "mixed", environment=TORCH_211),
    _users("FSDP2 on the newest torch", "fsdp2", "mixed", environment=TORCH_NEWEST),
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
    _ours("ours, blocks of rows", "sharded", "block-atomic mixed"),
    _ours("ours, whole tensors", "sharded", "tensor-atomic mixed"),
    _ours("ours, each tensor by itself", "sharded", "per-tensor mixed"),
    _ours("ours, HSDP", "sharded", "flat hsdp mixed"),
    _ours("ours, tensor parallel", "sharded", "block-atomic tensor-parallel"),
    _ours("ours, experts", "experts"),
    _ours("ours, Muon", "sharded", "tensor-atomic muon"),
    _ours("ours, offloaded", "sharded", "flat offload"),
    _ours("ours, quantized communication", "sharded", "block-atomic quantized mixed"),
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
    _ours("Megatron-FSDP", "megatron_fsdp_training", environment=MEGATRON_FSDP, **_REAL),
    _ours(
        "Megatron-FSDP, ZeRO-2",
        "megatron_fsdp_training",
        "optim_grads",
        environment=MEGATRON_FSDP,
        **_REAL,
    ),
    _ours(
        "Megatron-FSDP, ZeRO-1",
        "megatron_fsdp_training",
        "optim",
        environment=MEGATRON_FSDP,
        **_REAL,
    ),
    _ours(
        "Megatron-FSDP, double buffers",
        "megatron_fsdp_training",
        "double",
        environment=MEGATRON_FSDP,
        **_REAL,
        fault="overwrites a buffer of gradients on the stream of compute, which does not wait for "
        "their reduction: _enforce_double_buffer_limit() lets the stream of reductions wait",
    ),
    _ours("torchtitan", "torchtitan_trainer", environment=TORCHTITAN),
    _ours(
        "torchtitan, HSDP",
        "torchtitan_trainer",
        "--parallelism.data_parallel_replicate_degree 2",
        environment=TORCHTITAN,
    ),
    _ours(
        "torchtitan, tensor parallel",
        "torchtitan_trainer",
        "--parallelism.tensor_parallel_degree 2",
        environment=TORCHTITAN,
    ),
    _ours(
        "torchtitan, experts",
        "torchtitan_trainer",
        "--model.name deepseek_v3 --model.flavor debugmodel --parallelism.expert_parallel_degree 2",
        environment=TORCHTITAN,
    ),
    _ours(
        "torchtitan, asynchronous checkpoint",
        "torchtitan_trainer",
        "--checkpoint.enable --checkpoint.interval 1 --checkpoint.async_mode async",
        environment=TORCHTITAN,
        **_REAL,
    ),
    _ours("DeepSpeed, ZeRO-1", "deepspeed_zero", "1", environment=DEEPSPEED),
    _ours("DeepSpeed, ZeRO-2", "deepspeed_zero", "2", environment=DEEPSPEED),
    _ours("DeepSpeed, ZeRO-2, offloaded", "deepspeed_zero", "2 offload", environment=DEEPSPEED),
    _ours("DeepSpeed, ZeRO-3", "deepspeed_zero", "3", environment=DEEPSPEED),
]


def clone_examples(cache: Path) -> Path:
    """Return torch's examples, which are cloned if they are not there."""
    examples = cache / "examples"
    git = ["git", "-C", examples]
    commands = [
        ["git", "init", "--quiet", examples],
        [*git, "sparse-checkout", "set", "--no-cone", *NEEDED],
        [*git, "fetch", "--quiet", "--depth", "1", EXAMPLES, COMMIT],
        [*git, "checkout", "--quiet", COMMIT],
    ]
    fill(examples, COMMIT, commands, f"name a checkout of {EXAMPLES} at {COMMIT[:7]}: --examples")
    return examples


def write_texts(folder: Path) -> None:
    """Write small texts for a model of words."""
    for name in ("train", "valid", "test"):
        lines = (f" the {n % 7} counts to {n % 5} and {n % 3} \n" for n in range(400))
        (folder / f"{name}.txt").write_text("".join(lines))


def run(program: Right, options: argparse.Namespace) -> Found:
    """Run ``program`` on the emulated device.

    Raises:
        NotRun: it did not run to its end.
    """
    places = {
        "programs": HERE / "programs",
        "gpu_programs": ROOT / "tests" / "support" / "gpu_programs",
        "docs": ROOT / "docs" / "examples",
    }
    if program.needs_examples:
        places["examples"] = options.examples or clone_examples(options.cache)
    with tempfile.TemporaryDirectory() as data:
        if program.texts:
            write_texts(Path(data))
        places["data"] = Path(data)
        target = program.target.format(**places)
        arguments = [f"--steps={options.steps}", *program.options.split()]
        if program.ranks is not None:
            arguments.append(f"--ranks={program.ranks}")
        arguments += [target, *program.args.format(**places).split()]
        folder = Path(target).parent if program.needs_examples else Path(data)
        return find_races(
            program.environment, options.cache, arguments, folder=folder, seconds=options.seconds
        )


def row(program: Right, cells: Sequence[object]) -> str:
    """Return a row of the table."""
    is_own = program.environment == OWN
    where = program.origin if is_own else f"{program.origin}, {program.environment}"
    return f"| {' | '.join([program.name, where, *map(str, cells)])} |"


def show(program: Right, options: argparse.Namespace) -> bool:
    """Run ``program`` and print its row. Return whether it is as known."""
    try:
        found = run(program, options)
    except NotRun as reason:
        print(row(program, [f"not run: {reason}", "", "", ""]), flush=True)
        print(reason.printed, file=sys.stderr, flush=True)
        return False
    count, waits = len(found.told["findings"]), len(found.told["waits"])
    findings = f"{count}: {program.fault}" if program.fault else count
    not_seen = ", ".join(sorted(found.told["not_seen"]))
    print(row(program, [findings, waits, f"{found.seconds:.0f}", not_seen]), flush=True)
    is_as_known = bool(count) == bool(program.fault)
    if not is_as_known:
        print(f"{program.name}:\n{found.printed}", file=sys.stderr, flush=True)
    return is_as_known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="list the programs, and run none")
    parser.add_argument("--only", default="", help="run those whose names this regex finds")
    parser.add_argument("--steps", type=int, default=3, help="of an optimizer, in each")
    parser.add_argument("--seconds", type=float, default=300, help="that a program may take")
    parser.add_argument("--examples", type=Path, help="a checkout of torch's, instead of cloning")
    add_cache(parser)
    options = parser.parse_args()
    if options.examples is not None:
        options.examples = options.examples.resolve()
    chosen = [program for program in PROGRAMS if re.search(options.only, program.name)]
    if options.list:
        for program in chosen:
            print(f"{program.name}: {program.target} {program.args}".rstrip())
        return 0
    print("| program | from | findings | host waits per step | seconds | not seen |")
    print("|---|---|---|---|---|---|")
    wrong = sum(not show(program, options) for program in chosen)
    print(f"\n{len(chosen)} programs, {wrong} not as known")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
