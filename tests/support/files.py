"""Files for tests: data sets of token ids, as Megatron reads them, and whatever else has a name and contents."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np


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
