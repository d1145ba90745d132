"""One rank of `fsdp-overlap train`."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_overlap.cli.config import TrainConfig
from fsdp_overlap.cli.data import Text, bits, load_text, unigram_entropy
from fsdp_overlap.cli.display import Display
from fsdp_overlap.cli.run_folder import RunFolder
from fsdp_overlap.cli.system import cores
from fsdp_overlap.cli.trainer import PROFILED_STEPS, Trainer
from fsdp_overlap.profiling import render_overlap, summarize_overlap


def train(config: TrainConfig, device_type: str) -> None:
    """Trains as `config` says, on "cpu" with gloo or "cuda" with NCCL. Collective: called on every
    rank, with the environment that torchrun sets. Rank 0 alone prints and writes."""
    with _process_group(device_type) as device:
        text = load_text(config.data, config.seq_len)
        trainer = Trainer(config, text, device)
        if dist.get_rank() == 0:
            _report(config, text, trainer)
        else:
            for _ in trainer.run():
                pass
            trainer.profile_steps(None)


def _report(config: TrainConfig, text: Text, trainer: Trainer) -> None:
    """Runs `trainer` on rank 0, and shows and writes what it gives."""
    entropy = unigram_entropy(text.validation)
    about = {
        "ranks": dist.get_world_size(),
        "device": str(trainer.device),
        "torch": torch.__version__,
    }
    folder = RunFolder(config, about | {"text": text.origin, "unigram_entropy": entropy})
    with Display(config.steps) as display:
        display.print(
            f"{trainer.parameters:,} parameters on {dist.get_world_size()} ranks; "
            f"{len(text.train):,} + {len(text.validation):,} bytes of {text.origin}"
        )
        val_loss = None
        for metrics in trainer.run():
            folder.log(metrics)
            step = int(metrics["step"])
            val_loss = metrics.get("val_loss", val_loss)
            display.show(step, metrics["loss"], val_loss, metrics["tokens_per_s"])
            if "val_loss" in metrics:
                display.print(f"step {step}: loss {metrics['loss']:.3f}, validation {val_loss:.3f}")
    folder.plot(entropy)
    trainer.profile_steps(folder.trace)
    assert val_loss is not None, "the last step always validates"
    print(f"\noverlap on rank 0 over {PROFILED_STEPS} steps of {config.layers} blocks and the root")
    print(render_overlap(summarize_overlap(folder.trace)))
    print(f"\n{trainer.context.stats}")
    print(f"\nvalidation loss       {val_loss:.3f} nats/byte ({bits(val_loss):.3f} bits)")
    print(f"byte-unigram entropy  {entropy:.3f} nats/byte ({bits(entropy):.3f} bits), same text")
    print(f"run folder: {folder.path}")


@contextlib.contextmanager
def _process_group(device_type: str) -> Iterator[torch.device]:
    """The default process group, and this rank's device, from the environment that torchrun
    sets."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()
