"""Files for tests: data sets of token ids, as Megatron reads them, and whatever else has a name and contents."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """The folder, with these contents by the paths in it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_corpus(prefix: Path, documents: Iterable[Sequence[int]]) -> Path:
    """The pair of files `prefix`.bin and .idx, of 16-bit ids."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in documents:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def write_conversations(folder: Path) -> list[str]:
    """Conversations of 3 to 14 turns and a tokenizer of numbers in the folder, and the flags with which Megatron trains
    on them; skips the test where the packages of tokenizers are missing."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<eos>", *map(str, range(100))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    splitting = tokenizers.Tokenizer(model)
    splitting.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitting, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {{ eos_token }} {% endfor %}"
    tokenizer.save_pretrained(folder / "tokenizer")
    generator = np.random.default_rng(1)
    with open(folder / "chats.jsonl", "w") as file:
        for num_turns in generator.integers(3, 15, size=100):
            said = [" ".join(map(str, generator.integers(0, 100, size=size))) for size in range(2, 2 + num_turns)]
            roles = ("system", "user", "assistant") * 5
            chat = [{"role": role, "content": words} for role, words in zip(roles, said, strict=False)]
            file.write(json.dumps({"messages": chat}) + "\n")
    kind = ["--sft", "--sft-tokenizer-prompt-format", "default", "--tokenizer-type", "SFTTokenizer"]
    return [*kind, "--tokenizer-model", str(folder / "tokenizer"), "--data-path", str(folder / "chats.jsonl")]
