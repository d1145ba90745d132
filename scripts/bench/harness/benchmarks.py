"""All benchmarks, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A script of `scripts/bench` and its arguments, in a full and in a quick run.

    topic: the heading under which its results stand. measures: what, in words.
    """

    name: str
    script: str
    arguments: str
    quick: str
    topic: str = ""
    measures: str = ""

    def command(self, quick: bool) -> list[str]:
        """From the repository, without the interpreter."""
        arguments = self.quick if quick else self.arguments
        return [f"scripts/bench/{self.script}", *arguments.split()]


_HOST = "The host"
_LINK = "A slow link"
_DDP = "Against DDP"
_MEMORY = "Memory"
_MUON = "Muon"
_CHECKPOINTS = "Checkpoints"
_WEIGHTS = "Weights elsewhere"
_THOUSANDS = "Jobs of thousands"
_LAYOUTS = "Layouts and collectives"
_TRUTH = "What must hold"

BENCHMARKS = (
    Benchmark(
        "host_overhead",
        "host_overhead.py",
        "",
        "--rounds 10 --warmup 3",
        _HOST,
        "host time of a unit of 14 parameters, beyond the unsharded step",
    ),
    Benchmark(
        "host_copies",
        "host_overhead.py",
        "--rounds 40 --copies 2",
        "--rounds 5 --warmup 2 --copies 2",
        _HOST,
        "the same with two copies of each shard (HSDP)",
    ),
    Benchmark(
        "host_mixed",
        "host_overhead.py",
        "--rounds 40 --mixed",
        "--rounds 5 --warmup 2 --mixed",
        _HOST,
        "the same in bfloat16, reduced in float32",
    ),
    Benchmark(
        "units",
        "host_overhead.py",
        "--blocks 8 32 64 128 256 --rounds 30 --warmup 3",
        "--blocks 8 32 64 --rounds 5 --warmup 2",
        _HOST,
        "the same for 8 to 256 blocks",
    ),
    Benchmark(
        "optimizer",
        "optimizer.py",
        "",
        "--rounds 10 --warmup 3",
        _HOST,
        "host time of AdamW's step and of clipping by norm, 448 small parameters",
    ),
    Benchmark(
        "link",
        "link.py",
        "",
        "--rounds 2 --steps 1",
        _LINK,
        "forward and backward over 2 Gbit/s, against FSDP2 and the bound, with real compute",
    ),
    Benchmark(
        "schedule",
        "link.py",
        "--rows 64 --sleep 43 --rounds 5",
        "--rows 64 --sleep 43 --rounds 2 --steps 1",
        _LINK,
        "the same with compute that leaves the cores alone",
    ),
    Benchmark(
        "whole",
        "link.py",
        "--whole --rate 1gbit --rows 64 --sleep 90 --rounds 6 --steps 1",
        "--whole --rate 1gbit --rows 64 --sleep 90 --rounds 2 --steps 1 --blocks 4",
        _LINK,
        "a whole step, with clipping and AdamW, where compute takes as long as communication",
    ),
    Benchmark(
        "whole_ahead",
        "link.py",
        "--whole --rate 1gbit --rows 64 --sleep 90 --rounds 6 --steps 1 --prefetch 2",
        "--whole --rate 1gbit --rows 64 --sleep 90 --rounds 2 --steps 1 --blocks 4 --prefetch 2",
        _LINK,
        "the same with two units fetched ahead",
    ),
    Benchmark(
        "whole_computing",
        "link.py",
        "--whole --rate 1gbit --rows 64 --sleep 190 --rounds 4 --steps 1",
        "--whole --rate 1gbit --rows 64 --sleep 190 --rounds 2 --steps 1 --blocks 4",
        _LINK,
        "the same where compute takes twice as long",
    ),
    Benchmark(
        "whole_sending",
        "link.py",
        "--whole --rate 1gbit --rows 64 --sleep 40 --rounds 4 --steps 1",
        "--whole --rate 1gbit --rows 64 --sleep 40 --rounds 2 --steps 1 --blocks 4",
        _LINK,
        "the same where communication takes twice as long",
    ),
    Benchmark(
        "link_speed",
        "link_speed.py",
        "--rows 64 --sleep 40",
        "--rows 64 --sleep 40 --rounds 2 --steps 1 --rates 2gbit unlimited",
        _LINK,
        "forward and backward against the speed of the link",
    ),
    Benchmark(
        "link_4_ranks",
        "link.py",
        "--ranks 4 --rounds 5",
        "--ranks 4 --rounds 2 --steps 1",
        _LINK,
        "the same on four ranks",
    ),
    Benchmark(
        "hsdp",
        "hsdp.py",
        "",
        "--rounds 2 --blocks 3",
        _LINK,
        "training on a mesh with copies of each shard",
    ),
    Benchmark(
        "training",
        "link.py",
        "--optimizer muon --stage 2 --steps 1",
        "--optimizer muon --stage 2 --rounds 1 --steps 1",
        _LINK,
        "a step with Muon, and what overlap gains",
    ),
    Benchmark(
        "few_bits",
        "few_bits.py",
        "",
        "--rounds 1 --steps 1 --blocks 3",
        _LINK,
        "a step with parameters and gradients sent in 8 bits, and the bytes on the link",
    ),
    Benchmark(
        "ddp",
        "ddp.py",
        "",
        "--rounds 2",
        _DDP,
        "a step of training with clipping and AdamW, where a model fits",
    ),
    Benchmark(
        "memory",
        "memory.py",
        "",
        "--rounds 3",
        _MEMORY,
        "peak memory of forward and backward, in blocks of parameters",
    ),
    Benchmark(
        "stage_memory",
        "stage_memory.py",
        "",
        "--layers 3 --width 256",
        _MEMORY,
        "what the main job keeps at each ZeRO stage, releases, and needs to save",
    ),
    Benchmark(
        "muon",
        "muon.py",
        "",
        "--rounds 1",
        _MUON,
        "Muon's step, against FSDP2's and unsharded",
    ),
    Benchmark(
        "checkpoint",
        "checkpoint.py",
        "",
        "--rounds 2",
        _CHECKPOINTS,
        "time and memory of saving and loading",
    ),
    Benchmark(
        "async_saves",
        "async_saves.py",
        "",
        "--rounds 1 --blocks 2 --steps 2",
        _CHECKPOINTS,
        "what training loses to a save that is written beside it",
    ),
    Benchmark(
        "weights",
        "weights.py",
        "",
        "--rounds 1 --blocks 2",
        _WEIGHTS,
        "whole weights on all ranks, over 2 Gbit/s",
    ),
    Benchmark(
        "weights_resharded",
        "weights.py",
        "--reshard",
        "--reshard --rounds 1 --blocks 2",
        _WEIGHTS,
        "from two ranks that train to halves on two others",
    ),
    Benchmark(
        "thousands",
        "thousands.py",
        "",
        "--rounds 1 --world-size 16 --blocks 2",
        _THOUSANDS,
        "sharding, and the plan of a checkpoint, on 1,024 ranks",
    ),
    Benchmark(
        "collectives",
        "collectives.py",
        "",
        "--rounds 3 --warmup 1",
        _LAYOUTS,
        "ways to gather and to reduce on gloo",
    ),
    Benchmark(
        "layouts",
        "layouts.py",
        "",
        "--model Llama-3",
        _LAYOUTS,
        "balance and planning time for real models",
    ),
    Benchmark(
        "ragged",
        "link.py",
        "--layout whole",
        "--layout whole --rounds 2 --steps 1",
        _LAYOUTS,
        "a step over 2 Gbit/s with ragged shards, against equal ones",
    ),
    Benchmark(
        "order_check",
        "order_check.py",
        "",
        "--rounds 2 --blocks 3",
        _TRUTH,
        "what it costs that ranks check that they run the same units",
    ),
    Benchmark(
        "predicted",
        "predicted.py",
        "",
        "--rounds 1",
        _TRUTH,
        "steps and memory as predicted for this machine, against those measured",
    ),
    Benchmark(
        "soak",
        "soak.py",
        "",
        "--steps 200",
        _TRUTH,
        "2000 steps: flat memory, exact counters, equal ranks",
    ),
)
