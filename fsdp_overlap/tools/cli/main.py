"""The commands and their options."""

import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fsdp_overlap.checkpoint import CheckpointError, read_metadata
from fsdp_overlap.tools.cli.checkpoints import Checkpoints, how_to_go_on
from fsdp_overlap.tools.cli.config import TrainConfig, takes_options
from fsdp_overlap.tools.cli.data import load_text, unigram_entropy
from fsdp_overlap.tools.cli.doctor import doctor as examine
from fsdp_overlap.tools.cli.export import export as export_checkpoint
from fsdp_overlap.tools.cli.job import RUNS, run_of_this_job
from fsdp_overlap.tools.cli.launch import Place, describe_failure, find_place, launch
from fsdp_overlap.tools.cli.output import BadInput, takes_urls
from fsdp_overlap.tools.cli.report import report as write_overlap_report
from fsdp_overlap.tools.cli.report import watch as watch_traces
from fsdp_overlap.tools.cli.run_folder import check_out, read_saved_run
from fsdp_overlap.tools.cli.trainer import check_weights

app = typer.Typer(
    help="Fully-sharded data parallelism for PyTorch, with every collective under compute.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
@takes_urls
@takes_options
def train(
    context: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start [default: one per GPU, else 2].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or an accelerator as cuda.")] = "auto",
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="How often to go on from the latest checkpoint when a rank dies [default: 0]."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder, from its latest checkpoint."),
    ] = None,
    **options: Any,
) -> None:
    """Train a byte-level GPT with sharded parameters, and show how much communication ran under
    compute. SIGTERM and Ctrl-C save a checkpoint and stop."""
    place = find_place(ranks, device, max_restarts)
    if resume is not None:
        _check_alone(context)
        _go_on(resume, place)
        return
    if place.joining and (begun := run_of_this_job(options["out"])) is not None:
        _go_on(begun, place)
        return
    out = options["out"] or RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    config = TrainConfig(**options | {"out": out})
    check_out(config.out)
    load_text(config.data, config.seq_len)
    check_weights(config)
    _run(config, place, resume=False)


def _check_alone(context: typer.Context) -> None:
    """Raise BadInput if --resume was given together with an option that it cannot change."""
    given = [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None
        and source.name != "DEFAULT"
        and name not in ("resume", "ranks", "device", "max_restarts")
    ]
    if given:
        raise BadInput(
            f"--{given[0].rstrip('_').replace('_', '-')} cannot be changed by --resume, which goes "
            "on with the run as it was; --ranks, --device and --max-restarts can"
        )


def _go_on(folder: Path, place: Place) -> None:
    begun = read_saved_run(folder)
    config = begun.config
    together = begun.ranks * config.batch_size
    per_microbatch = together // config.microbatches
    if per_microbatch % place.ranks:
        what = "step" if config.microbatches == 1 else "microbatch"
        raise BadInput(
            f"--ranks {place.ranks}: the run's {per_microbatch} sequences a {what} cannot be "
            "shared equally; use a divisor of that"
        )
    if (latest := Checkpoints(folder / "checkpoints", config.keep).latest()) is not None:
        try:
            read_metadata(latest)
        except CheckpointError as error:
            raise BadInput(
                f"--resume {folder}: {error}; remove {latest} to resume from the checkpoint before"
            ) from None
    text = load_text(config.data, config.seq_len)
    if unigram_entropy(text.validation) != begun.unigram_entropy:
        raise BadInput(f"--resume {folder}: {text.origin} is not the text that the run began with")
    batch_size = together // place.ranks
    _run(replace(config, batch_size=batch_size), place, resume=True)


def _run(config: TrainConfig, place: Place, resume: bool) -> None:
    try:
        launch(config, place, resume)
    except ChildFailedError as error:
        _complain(describe_failure(error))
        if (advice := how_to_go_on(config.out)) is not None:
            print(advice, file=sys.stderr)
        raise typer.Exit(1) from None
    except SignalException as stop:  # the launcher has ended its ranks
        _complain(f"stopped by {stop.sigval.name}")
        raise typer.Exit(128 + stop.sigval) from None


@app.command()
@takes_urls
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that DCP wrote.")],
    out: Annotated[Path, typer.Argument(help="A new .pt, .pth or .safetensors file.")],
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Take what is under this key, with names less the key [default: model, or all of "
            "a bare state dict]."
        ),
    ] = None,
) -> None:
    """Write the tensors of a checkpoint to one file that needs no DCP to be read."""
    count = export_checkpoint(checkpoint, out, prefix)
    print(f"{count} tensors in {out}")


@app.command()
@takes_urls
def report(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Chrome traces of torch.profiler, one for each rank, or a folder of them, such as "
            "that of a run."
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Traces, or a folder of them, of another run, such as of FSDP2."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for overlap.html, .png and .json [default: beside the traces]."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps in each trace [default: as the trace says].")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Report again when a job has written other traces.")
    ] = False,
) -> None:
    """Say which communication ran under compute, which did not, and why. Traces may be gzipped, and
    of this library or FSDP2."""
    if steps is not None and steps < 1:
        raise BadInput(f"--steps {steps}: must be at least 1")
    make_reports = watch_traces if watch else write_overlap_report
    make_reports(traces, against or [], out, steps)


@app.command()
@takes_urls
def simulate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="llama3-8b, llama3-70b, llama3-405b, moonlight-16b, deepseek-v3, a config.json of "
            "transformers or its folder, or module:function that makes a module."
        ),
    ],
    gpus: Annotated[int, typer.Option(help="Devices, one a rank.")] = 8,
    device: Annotated[str, typer.Option(help="A device's name, or its TOML file.")] = "h100_sxm",
    fabric: Annotated[
        str, typer.Option(help="A fabric's name, or its TOML file.")
    ] = "nvlink4_400g",
    network: Annotated[
        float | None, typer.Option(help="Gb/s of a GPU between nodes [default: the fabric's].")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Trace of the model on one such device, with shapes.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas of each shard.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Expert parallel degree.")] = 1,
    expert_parallel_comm_backend: Annotated[
        str, typer.Option(help="standard, or deepep: a token travels once to each rank.")
    ] = "standard",
    tensor_parallel: Annotated[int, typer.Option(help="Tensor parallel degree.")] = 1,
    context_parallel: Annotated[int, typer.Option(help="Context parallel degree.")] = 1,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per rank and microbatch.")] = 1,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence [default: the model's positions, at most 8192]."),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Backwards per optimizer step.")] = 1,
    checkpointing: Annotated[
        str, typer.Option(help="none, selective, or full: what is recomputed in backward.")
    ] = "none",
    selective_ac_option: Annotated[
        str, typer.Option(help="op, or N: recompute all of every N-th block.")
    ] = "op",
    blocks_per_unit: Annotated[int, typer.Option(help="Blocks that are gathered as one.")] = 1,
    stage: Annotated[int, typer.Option(help="ZeRO stage: 3 frees weights after each use.")] = 3,
    layout: Annotated[str, typer.Option(help="flat, per-tensor or tensor-atomic.")] = "flat",
    prefetch: Annotated[int, typer.Option(help="Units gathered ahead.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Of parameters at rest, and of states: float32 or bfloat16.")
    ] = "float32",
    mixed_precision_param: Annotated[
        str, typer.Option(help="Of compute and all-gathers: bfloat16 or float32.")
    ] = "bfloat16",
    mixed_precision_reduce: Annotated[
        str, typer.Option(help="Of reductions: float32 or bfloat16.")
    ] = "float32",
    linear_dtype: Annotated[
        str | None, typer.Option(help="float8, by torchao [default: bfloat16].")
    ] = None,
    loss: Annotated[
        str,
        typer.Option(help="standard, eager (not compiled), fused (one kernel), or chunked."),
    ] = "standard",
    attention: Annotated[
        str, typer.Option(help="flash, as torch has it, or cudnn, also for FlashAttention-3.")
    ] = "flash",
    rented: Annotated[
        bool, typer.Option("--rented", help="A cloud's GPUs, which differ more than one owner's.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Fuse kernels, as torch.compile does.")
    ] = False,
    expandable_segments: Annotated[
        bool, typer.Option("--expandable-segments", help="As PYTORCH_ALLOC_CONF has it.")
    ] = False,
    matmul_stretch: Annotated[
        float, typer.Option(help="How many times as long products take, by a measurement.")
    ] = 1.0,
    other_stretch: Annotated[
        float, typer.Option(help="How many times as long all other compute takes.")
    ] = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw, torch-adamw or muon.")] = "adamw",
    against_fsdp2: Annotated[
        bool, typer.Option("--against-fsdp2", help="Predict FSDP2 on the same, too.")
    ] = False,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Keep shards, gradients and states on a host: xeon_32_cores, or its TOML file.",
        ),
    ] = None,
    reshard_after_forward: Annotated[
        int | None, typer.Option(help="Neighbors that keep a block's weights until backward.")
    ] = None,
    implicit_units: Annotated[
        bool,
        typer.Option("--implicit-units", help="Gather embedding and head apart from the root."),
    ] = False,
    reduce_each: Annotated[
        bool, typer.Option("--reduce-each", help="Reduce gradients in each microbatch.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Search for the fastest plan that fits.")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(help="GiB that a rank may take [default: the device's].")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars for an hour of a GPU.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the trace and its report, or the best plan.")
    ] = None,
) -> None:
    """Predict a training step on many GPUs, which need not be there: its time, its memory, and what
    communication it waits for. Run the library's own schedule on emulated time. --best looks for
    the fastest way to do the step, and prints it as code."""
    # Gives torch one more kind of device.
    from fsdp_overlap.tools.cli.simulate import predict

    predict(**context.params | {"profile": profile, "out": out})  # there paths are strings


@app.command(context_settings={"allow_interspersed_args": False})
@takes_urls
def races(
    program: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="A program for GPUs, and its arguments."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(help="Be one of so many ranks, of which the others do not exist."),
    ] = None,
    rank: Annotated[int, typer.Option(help="Which of them.")] = 0,
    real: Annotated[
        bool, typer.Option("--real", help="Run all ranks, each in a process of its own.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps of an optimizer.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="file.py:12: what is found on this line is no fault.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was found to this file.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also draw it on a page, with the streams around it.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="The program is a module.")] = False,
) -> None:
    """Run a program that is written for GPUs, on a machine without one, and show what its streams
    leave unordered. Exit code 1 if something is, 2 if the program could not run."""
    if rank < 0 or rank >= (ranks or 1):
        raise BadInput(f"--rank {rank}: must be 0 or more, and below --ranks {ranks or 1}")
    if steps is not None and steps < 1:
        raise BadInput(f"--steps {steps}: must be at least 1")
    # Gives torch one more kind of device.
    from fsdp_overlap.tools.races.runner import Program, report, run

    target, *args = program
    if not module and not Path(target).is_file():
        raise BadInput(f"{target}: there is no such file")
    result = run(Program(target, args, module, steps, allow or ()), ranks, rank, real)
    code = report(*result, json_path, page)
    raise typer.Exit(code)


@app.command("compare", context_settings={"allow_interspersed_args": False})
@takes_urls
def compare_command(
    program: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="A program that calls fully_shard()."),
    ],
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start [default: 2; under torchrun, its own].")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps to record, and as many again to time; two are profiled.")
    ] = 5,
    rounds: Annotated[
        int, typer.Option(help="How often each way is timed, in turns with the others.")
    ] = 1,
    ddp: Annotated[
        bool,
        typer.Option("--ddp", help="Also train without shards, with gradients summed in float64."),
    ] = False,
    options: Annotated[
        Path | None, typer.Option(help="TOML file with options of this library.")
    ] = None,
    emulate_gpus: Annotated[
        bool,
        typer.Option(
            "--emulate-gpus", help="Run a program for GPUs without one, to compare values alone."
        ),
    ] = False,
    predict: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Predict steps of a program for GPUs, as h100_sxm."),
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs --predict is for, one a rank.")] = 8,
    fabric: Annotated[str, typer.Option(help="What connects them.")] = "nvlink4_400g",
    keep: Annotated[
        str | None, typer.Option(help="Save all tensors of the module of this name.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of random numbers, before the program sets its own.")
    ] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 1800.0,
    assert_loss: Annotated[
        float | None, typer.Option(help="Fail if losses differ by more, relative to FSDP2's.")
    ] = None,
    assert_time: Annotated[
        float | None, typer.Option(help="Fail if a step takes more than this part of FSDP2's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all files [default: runs/compare-<timestamp>].")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="The program is a module.")] = False,
) -> None:
    """Run a program that is written for FSDP2 as it is, and on this library, and say what is
    faster, and whether both compute the same. Nothing in the program changes. Exit code 1 if they
    differ by more than the order of sums, or an assertion fails, 2 if a run failed."""
    if steps < 1 or rounds < 1:
        raise BadInput(f"--steps {steps} --rounds {rounds}: must be at least 1")
    if timeout <= 0:
        raise BadInput(f"--timeout {timeout:g}: must be more than 0")
    target, *args = program
    if not module and not Path(target).is_file():
        raise BadInput(f"{target}: there is no such file")
    # Imports both libraries, and what draws pages.
    from fsdp_overlap.tools.cli.compare import Limits, compare_program, predict_both
    from fsdp_overlap.tools.races.runner import Program

    when = datetime.now().strftime("%Y%m%d-%H%M%S")
    out = out or RUNS / f"compare-{when}"
    if predict is not None:
        predict_both(Program(target, args, module), predict, fabric, gpus, out)
        return
    code = compare_program(
        Program(target, args, module),
        ranks,
        steps,
        rounds,
        ddp,
        emulate_gpus,
        options,
        keep,
        seed,
        timeout,
        Limits(assert_loss, assert_time),
        out,
    )
    raise typer.Exit(code)


@app.command("diff")
@takes_urls
def diff_command(
    a: Annotated[Path, typer.Argument(help="A folder that compare or record() wrote.")],
    b: Annotated[Path, typer.Argument(help="That of another run.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was found to this file.")
    ] = None,
) -> None:
    """Say where two recorded runs part: the first step, module and parameter in the order of
    execution that differ by more than the order of sums explains. Exit code 1 if they do."""
    from fsdp_overlap.tools.cli.compare import diff_recordings

    raise typer.Exit(diff_recordings((a, b), json_path))


@app.command()
def doctor(
    timeout: Annotated[
        float, typer.Option(help="Seconds that the trial with two ranks may take.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether this machine is ready, and what to do where it is not. Looks at versions,
    devices, the network and variables, then tries two ranks on gloo. Exit code 1 if something that
    is needed is missing."""
    if timeout <= 0:
        raise BadInput(f"--timeout {timeout:g}: must be more than 0")
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        return  # one answer, not one per rank, where torchrun started us
    if not examine(timeout, as_json):
        raise typer.Exit(1)


def run() -> int:
    """Run the program. Return its exit code: 2 for input that it cannot work with."""
    try:
        app()
    except BadInput as error:
        if os.environ.get("RANK", "0") == "0":  # one line, where torchrun has started several ranks
            _complain(str(error))
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}")
        return 2
    return 0


def _complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
