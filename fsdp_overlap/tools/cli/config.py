"""Options of a training run."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from fsdp_overlap.tools.cli.output import BadInput

# The peak learning rate that trains the default model best, to within a factor of two.
BEST_LR = {"adamw": 3e-3, "muon": 1e-2}
GATHER_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True)
class TrainConfig:
    """The options of a run, which `resume` does not change. Raises BadInput if such a run is
    impossible."""

    out: Annotated[Path, typer.Option(help="Run folder [default: runs/<timestamp>].")]
    data: Annotated[
        Path | None,
        typer.Option(help="File or folder of text [default: the standard library's sources]."),
    ] = None
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="File or folder of safetensors to begin with, as of export [default: random "
            "weights].",
        ),
    ] = None
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 160
    batch_size: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 4
    microbatches: Annotated[
        int, typer.Option(help="Equal parts of these sequences, trained one after the other.")
    ] = 1
    seq_len: Annotated[int, typer.Option(help="Bytes per sequence.")] = 128
    layers: Annotated[int, typer.Option(help="Blocks, each a unit of its own.")] = 6
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 192
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 6
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw"
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate [default: 0.003 for adamw, 0.01 for muon]."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0
    zero_stage: Annotated[
        int,
        typer.Option(
            help="3 shards everything; 2 keeps full parameters between steps; 1 keeps full "
            "gradients too, between microbatches."
        ),
    ] = 3
    prefetch: Annotated[int, typer.Option(help="All-gathers that may run ahead of compute.")] = 1
    dtype: Annotated[str, typer.Option(help="Compute in float32 or bfloat16.")] = "float32"
    gather_dtype: Annotated[
        str | None,
        typer.Option(
            help="Gather matrices in float8_e4m3fn, float8_e5m2 or int8 [default: as computed in]."
        ),
    ] = None
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = 40
    log_every: Annotated[int, typer.Option(help="Steps between lines of metrics.")] = 5
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 40
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2

    def __post_init__(self) -> None:
        at_least_one = (
            "steps",
            "batch_size",
            "microbatches",
            "seq_len",
            "layers",
            "width",
            "heads",
            "eval_every",
            "log_every",
            "save_every",
            "keep",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise BadInput(f"{_option(name)} {getattr(self, name)}: must be at least 1")
        for name in ("prefetch", "seed"):
            if getattr(self, name) < 0:
                raise BadInput(f"{_option(name)} {getattr(self, name)}: must not be negative")
        if self.zero_stage not in (1, 2, 3):
            raise BadInput(f"--zero-stage {self.zero_stage}: use 1, 2 or 3")
        if self.batch_size % self.microbatches:
            more = -(-self.batch_size // self.microbatches) * self.microbatches
            raise BadInput(
                f"--microbatches {self.microbatches}: --batch-size {self.batch_size} cannot be "
                f"split into as many equal parts; use a divisor of {self.batch_size}, or "
                f"--batch-size {more}"
            )
        if self.optimizer not in BEST_LR:
            raise BadInput(f"--optimizer {self.optimizer}: use {' or '.join(BEST_LR)}")
        lr = BEST_LR[self.optimizer] if self.lr is None else self.lr
        object.__setattr__(self, "lr", lr)
        if not 0 < lr < float("inf"):
            raise BadInput(f"--lr {lr}: must be a positive number")
        if self.dtype not in ("float32", "bfloat16"):
            raise BadInput(f"--dtype {self.dtype}: use float32 or bfloat16")
        if self.gather_dtype not in (None, *GATHER_DTYPES):
            raise BadInput(f"--gather-dtype {self.gather_dtype}: use {', '.join(GATHER_DTYPES)}")
        if self.width % (2 * self.heads):
            fits = [h for h in range(1, self.width // 2 + 1) if self.width % (2 * h) == 0]
            advice = (
                f"heads that fit this width: {', '.join(map(str, fits))}"
                if fits
                else "use an even width"
            )
            raise BadInput(
                f"--width {self.width} cannot be split into --heads {self.heads} of an even size; "
                f"{advice}"
            )


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**options` an option for each field of TrainConfig. None of them
    is required."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(TrainConfig)
    ]
    vars(command)["__signature__"] = signature.replace(parameters=[*own, *taken])
    return command


def _option(field: str) -> str:
    return "--" + field.rstrip("_").replace("_", "-")
