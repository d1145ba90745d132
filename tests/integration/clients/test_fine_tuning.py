"""PEFT's adapters and TRL's trainer work on our units as on FSDP2's, on frozen weights too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.clients import check_whose, example, forget_accelerators, whole
from support.ranks import close_pool, run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("peft") is None or find_spec("trl") is None, reason="needs peft and trl"
)


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own() -> Iterator[None]:
    """What clients leave behind in a process ends with it."""
    yield
    close_pool()


def elements(model: nn.Module, wanted: bool) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad == wanted)


# ---- PEFT ----

STEPS = 3


def adapters(folder: str, half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    with example("peft_training") as program:
        first = whole(program.Training(dtype=dtype).model)
        ours, losses = program.run(Path(folder) / "ours", STEPS, dtype=dtype)
        theirs, expected = program.run(Path(folder) / "theirs", STEPS, is_fsdp2=True, dtype=dtype)
        check_whose(ours.model, theirs.model)
        assert losses == pytest.approx(expected, rel=1e-3 if half else 1e-5)
        trained = [value for name, value in whole(ours.model).items() if "lora_B" in name]
        assert trained
        assert all(map(torch.any, trained))  # they begin as zeros
        check_frozen(ours.model, first, dtype)
        check_traffic(ours, dtype.itemsize)
        dist.barrier()  # until the first rank has written
        loaded = program.load(Path(folder) / "ours", dtype)
        others = program.load(Path(folder) / "theirs", dtype)
        check_saved(ours.model, loaded, others, 1e-2 if half else 1e-5)
        tokens = program.batch(STEPS, torch.device("cpu"))
        for model in (ours.model, loaded):
            model.eval()
        with torch.no_grad():
            assert torch.equal(ours.model(tokens).logits, loaded(tokens).logits)
            with loaded.disable_adapter():
                without = loaded(tokens).logits
        assert not torch.equal(ours.model(tokens).logits, without)


def check_frozen(model: nn.Module, first: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Adapters alone were trained, in float32, beside frozen weights of ``dtype``."""
    for name, value in whole(model).items():
        is_adapter = "lora" in name
        assert value.dtype is (torch.float32 if is_adapter else dtype), name
        assert torch.equal(value, first[name]) != is_adapter, name


def check_traffic(training: Any, itemsize: int) -> None:
    """Frozen weights are gathered, and nothing is reduced for them."""
    stats = training.ctx.stats
    assert stats.order_checks == STEPS
    assert stats.reduce_scatters == 2 * STEPS  # of the blocks, as the root has no adapters
    assert stats.reduce_scatter_bytes == 4 * elements(training.model, True) * STEPS
    stats.reset()
    with torch.no_grad():
        training.model(torch.zeros(1, 1, dtype=torch.long))
    frozen, trained = (elements(training.model, wanted) for wanted in (False, True))
    assert stats.all_gather_bytes == itemsize * frozen + 4 * trained
    assert stats.current_full_buffers == 0


def check_saved(ours: Any, loaded: nn.Module, others: nn.Module, tolerance: float) -> None:
    trained = whole(ours)
    expected = dict(others.named_parameters())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, trained[name]), name
        torch.testing.assert_close(
            value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_adapters_train_on_frozen_weights_and_are_saved_alone(tmp_path: Path, half: bool) -> None:
    run_ranks(adapters, 2, str(tmp_path), half, timeout=150)
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    size = (tmp_path / "ours" / "adapter_model.safetensors").stat().st_size
    assert size == (tmp_path / "theirs" / "adapter_model.safetensors").stat().st_size


# ---- TRL ----


def tuned(folder: str, lora: bool) -> None:
    with example("trl_training") as program:
        trainers, contexts, logs = [], [], []
        for is_fsdp2 in (False, True):
            forget_accelerators()
            path = Path(folder) / ("theirs" if is_fsdp2 else "ours")
            trainer, ctx = program.run(
                path, STEPS, is_fsdp2, lora, gradient_accumulation_steps=2, max_grad_norm=0.5
            )
            trainers.append(trainer)
            contexts.append(ctx)
            logs.append([log for log in trainer.state.log_history if "grad_norm" in log])
        forget_accelerators()
        ours, theirs = (trainer.model for trainer in trainers)
        check_whose(ours, theirs)
        for key in ("loss", "grad_norm", "entropy"):
            found, expected = ([log[key] for log in each] for each in logs)
            assert len(found) == STEPS
            assert found == pytest.approx(expected, rel=1e-4), key
        # The blocks, the embedding, and the last norm with the head. Of adapters the blocks alone.
        assert contexts[0].stats.reduce_scatters == (2 if lora else 4) * STEPS
        values, expected = whole(ours), whole(theirs)
        assert values.keys() == expected.keys()
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)
        dist.barrier()
        check_written(program, Path(folder) / "ours", values, lora)


def check_written(program: Any, folder: Path, values: dict[str, torch.Tensor], lora: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if lora:
        loaded = PeftModel.from_pretrained(program.make_model(program.make_tokenizer()), folder)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(loaded.named_parameters())
    assert found.keys() == values.keys()
    for name, value in found.items():
        assert torch.equal(value, values[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lora", [False, True])
def test_trl_fine_tunes_as_on_fsdp2(tmp_path: Path, lora: bool) -> None:
    run_ranks(tuned, 2, str(tmp_path), lora, timeout=150)


def preferences(program: Any) -> Any:
    """Prompts that count up, and completions that go on or go back."""
    from datasets import Dataset

    rows = []
    for index in range(32):
        words = [str((index + index // 3 * place) % program.NUMBERS) for place in range(8)]
        last, first = f" {' '.join(words[4:])} <eos>", f" {' '.join(words[3::-1])} <eos>"
        rows.append({"prompt": " ".join(words[:4]), "chosen": last, "rejected": first})
    return Dataset.from_list(rows)


def preferred(folder: str) -> None:
    """The reference is the model with its adapters switched off."""
    with example("trl_training") as program:
        from trl import DPOConfig, DPOTrainer

        class Trainer(DPOTrainer):
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                program.use_fsdp_on_cpu(self)

        ctx = program.FsdpContext()
        models, logs = [], []
        for sharding in (program.patch_fsdp2(ctx), nullcontext()):
            forget_accelerators()
            tokenizer = program.make_tokenizer()
            trainer = Trainer(
                model=program.make_model(tokenizer),
                args=DPOConfig(**program.make_settings(Path(folder), STEPS)),
                train_dataset=preferences(program),
                processing_class=tokenizer,
                peft_config=program.ADAPTERS,
            )
            with sharding:
                trainer.train()
            models.append(trainer.model)
            logs.append([log for log in trainer.state.log_history if "grad_norm" in log])
        forget_accelerators()
        check_whose(*models)
        for key in ("loss", "grad_norm", "rewards/margins"):
            found, expected = ([log[key] for log in each] for each in logs)
            assert len(found) == STEPS
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), key
        values, expected = map(whole, models)
        assert values.keys() == expected.keys()
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_trl_learns_preferences_as_on_fsdp2(tmp_path: Path) -> None:
    run_ranks(preferred, 2, str(tmp_path), timeout=150)
