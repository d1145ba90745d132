"""Write the small files that programs of `programs.toml` read in place of downloads.

`python program_files.py KIND PATH [ARGUMENT...]` writes one, relative to the current folder. All
values are random, from seeds of their own, so that every run has the same.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


def write_model(path: str, kind: str = "llama") -> None:
    """Write a model of transformers with two layers, and a tokenizer of single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    options = {} if kind == "gpt_neox" else {"num_key_value_heads": 2}
    if kind == "smollm3":
        options["pad_token_id"] = 257
    config = AutoConfig.for_model(
        kind,
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        **options,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        model_max_length=256,
    ).save_pretrained(path)


def _texts(count: int) -> Iterator[str]:
    choice = random.Random(0)
    words = ["".join(choice.choices("abcdefghij", k=5)) for _ in range(32)]
    for _ in range(count):
        first = choice.randrange(32)
        yield " ".join(words[(first + 3 * place) % 32] for place in range(20))


def write_texts(path: str, count: str = "200") -> None:
    """Write texts of random words as lines of JSON."""
    rows = [json.dumps({"text": text}) for text in _texts(int(count))]
    Path(path).write_text("\n".join(rows) + "\n")


def write_sentencepiece(path: str) -> None:
    """Write a tokenizer of the letters in those texts."""
    from sentencepiece import SentencePieceTrainer  # type: ignore[import-not-found]

    with Path(path).open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=_texts(200),
            model_writer=file,
            model_type="char",
            vocab_size=32,
            hard_vocab_limit=False,
        )


def write_pairs(path: str, count: str = "64") -> None:
    """Write prompts with a preferred answer and another."""
    texts = list(_texts(2 * int(count)))
    rows = [
        {"prompt": f"{first[:20]} ", "chosen": first[20:60], "rejected": second[20:60]}
        for first, second in zip(texts[::2], texts[1::2], strict=True)
    ]
    Path(path).write_text("\n".join(map(json.dumps, rows)) + "\n")


def write_ids(path: str, count: str, vocabulary: str = "50257", header: bytes = b"") -> None:
    """Write tokens as uint16, after ``header``."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, int(vocabulary), int(count)).astype(np.uint16)
    Path(path).write_bytes(header + tokens.tobytes())


def write_tokens(path: str, count: str) -> None:
    """Write tokens as llm.c has them: a header of 256 int32, and uint16."""
    import numpy as np

    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, int(count)
    write_ids(path, count, header=header.tobytes())


def write_torchvision(path: str, images: str = "128") -> None:
    """Write a module in the place of torchvision, which needs the torch that it was built with, and
    whose CIFAR-10 cannot be other images. Here it is random ones."""
    Path(path).write_text(f"""import sys
from types import ModuleType

import torch


class CIFAR10(torch.utils.data.TensorDataset):
    def __init__(self, *args, **kwargs):
        seeded = torch.Generator().manual_seed(0)
        images = torch.randn({images}, 3, 32, 32, generator=seeded)
        super().__init__(images, torch.randint(10, ({images},), generator=seeded))


def ignored(*args):
    pass


def module(name, **contents):
    made = sys.modules[f"torchvision.{{name}}"] = ModuleType(name)
    vars(made).update(contents)
    return made


datasets = module("datasets", CIFAR10=CIFAR10)
v2 = module("transforms.v2", functional=None)
transforms = module("transforms", Compose=ignored, Normalize=ignored, ToTensor=ignored, v2=v2)
""")


def write_checkpoint(path: str, kind: str = "") -> None:
    """Write a checkpoint of the model in `model.py`, of torch's example of FSDP2 and what was made
    of it: one step from initialized weights, which the example itself does not begin with."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    sys.path.insert(0, ".")
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Transformer(
        ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.randint(0, 1024, (4, 64))).sum().backward()
    optimizer.step()
    by_name = get_optimizer_state_dict(model, optimizer)
    for api, states in ("dtensor_api", optimizer.state_dict()), ("dcp_api", by_name):
        folder = Path(path, api, "1")
        folder.mkdir(parents=True)
        torch.save(model.state_dict(), folder / "model_state_dict.pt")
        torch.save(states, folder / "optim_state_dict.pt")


KINDS: dict[str, Callable[..., None]] = {
    "checkpoint": write_checkpoint,
    "ids": write_ids,
    "model": write_model,
    "pairs": write_pairs,
    "sentencepiece": write_sentencepiece,
    "texts": write_texts,
    "tokens": write_tokens,
    "torchvision": write_torchvision,
}

if __name__ == "__main__":
    kind, path, *arguments = sys.argv[1:]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, *arguments)
