"""What a training run was asked to do."""

from dataclasses import dataclass
from pathlib import Path

from fsdp_overlap.cli.output import BadInput

# The peak learning rate that trains the default model best, to within a factor of two.
BEST_LR = {"adamw": 3e-3, "muon": 1e-2}
GATHER_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True)
class TrainConfig:
    """Raises BadInput if such a run is impossible.

    lr: the peak; by default the optimizer's in BEST_LR.
    data: a file or a folder of text; None for the standard library's sources.
    batch_size: sequences per rank and step, those of all microbatches. seq_len: bytes per sequence.
    zero_stage: what is sharded between steps, as in `set_zero_stage`.
    microbatches: equal parts of a rank's sequences, each with a forward and backward of its own.
    prefetch: how many all-gathers may run ahead of compute.
    gather_dtype: the codes of weights in all-gathers, one of GATHER_DTYPES; None for those of
        compute.
    eval_every: steps between validations. log_every: steps between lines of metrics.
    save_every: steps between checkpoints. keep: how many of them are kept.
    """

    out: Path
    data: Path | None = None
    steps: int = 160
    batch_size: int = 4
    seq_len: int = 128
    layers: int = 6
    width: int = 192
    heads: int = 6
    optimizer: str = "adamw"
    lr: float | None = None
    seed: int = 0
    zero_stage: int = 3
    microbatches: int = 1
    prefetch: int = 1
    dtype: str = "float32"
    gather_dtype: str | None = None
    eval_every: int = 40
    log_every: int = 5
    save_every: int = 40
    keep: int = 2

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


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
