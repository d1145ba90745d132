"""torchtitan's trainer, 0.2, with its smallest Llama, a tokenizer of bytes, and texts made here.
More arguments are torchtitan's."""

import json
import os
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def write_assets(folder: Path) -> None:
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "texts").mkdir()
    lines = (json.dumps({"text": f"{n} and {n + 1} come before {n + 2}"}) for n in range(2000))
    (folder / "texts" / "texts.jsonl").write_text("\n".join(lines))


def train() -> None:
    with tempfile.TemporaryDirectory() as made:
        write_assets(Path(made))
        os.environ["HF_DATASETS_CACHE"] = f"{made}/cache"
        sys.argv[1:] = [
            *("--job.dump_folder", made),
            *("--model.name", "llama3", "--model.flavor", "debugmodel"),
            *("--model.hf_assets_path", made),
            *("--training.dataset", "c4_test", "--training.dataset_path", f"{made}/texts"),
            *(
                "--training.seq_len",
                "64",
                "--training.local_batch_size",
                "2",
                "--training.steps",
                "6",
            ),
            *("--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2"),
            *sys.argv[1:],
        ]
        from torchtitan.train import Trainer, main  # reads the arguments when it is imported

        main(Trainer)


if __name__ == "__main__":
    train()
