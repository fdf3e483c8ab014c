"""Whether the data sets that a run reads are whole, looked at before any work is done."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Megatron's index: a magic word, the version, the type of the tokens, the number of sequences, that of documents.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKENS = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_PIECES, _PIECE = 64, 65536
_MAKE = "make it again with seq1f1b preprocess"


def check_data(flag: str, prefix: str) -> None:
    """Raise ValueError if the `.bin`/`.idx` pair is missing, cut short, or not a pair."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if prefix.endswith((".bin", ".idx")) and not index.exists():
        raise ValueError(f"{flag} {prefix}: give the name without {prefix[-4:]}; it stands for both files of the pair")
    if prefix.endswith((".json", ".jsonl")) and not index.exists():
        raise ValueError(f"{flag} {prefix}: there is no such file")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(f"{flag} {prefix}: there is no file {path}; seq1f1b preprocess makes it")
    try:
        with open(index, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if header[: len(_MAGIC)] != _MAGIC:
                raise ValueError(f"{flag} {prefix}: {index} is not an index of Megatron's; {_MAKE}")
            if len(header) < _HEADER.size:
                raise ValueError(f"{flag} {prefix}: {index} is cut short; {_MAKE}")
            _, version, token, num_sequences, num_documents = _HEADER.unpack(header)
            if version != 1 or token not in _TOKENS:
                raise ValueError(f"{flag} {prefix}: {index} has version {version}, token type {token}; {_MAKE}")
            if num_sequences == 0:
                raise ValueError(f"{flag} {prefix}: {index} holds no documents; {_MAKE}")
            needed = _HEADER.size + (4 + 8) * num_sequences + 8 * num_documents
            if size < needed:
                raise ValueError(
                    f"{flag} {prefix}: {index} has {size} bytes, but its {num_sequences} sequences and "
                    f"{num_documents} documents take {needed}; {_MAKE}"
                )
        lengths = np.memmap(index, "<i4", "r", _HEADER.size, (num_sequences,))
        positions = np.memmap(index, "<i8", "r", _HEADER.size + 4 * num_sequences, (num_sequences,))
        documents = np.memmap(index, "<i8", "r", _HEADER.size + (4 + 8) * num_sequences, (num_documents,))
    except OSError as error:
        raise ValueError(f"{flag} {prefix}: {index} cannot be read ({error.strerror})") from None
    width = np.dtype(_TOKENS[token]).itemsize
    if not _is_consistent(lengths, positions, documents, width):
        raise ValueError(
            f"{flag} {prefix}: {index} holds lengths, positions or documents that do not follow one another; {_MAKE}"
        )
    expected = int(positions[-1]) + int(lengths[-1]) * width
    if data.stat().st_size != expected:
        raise ValueError(
            f"{flag} {prefix}: {data} has {data.stat().st_size} bytes, but its index stands for {expected}; {_MAKE}"
        )


def check_token_ids(flag: str, prefix: str, vocabulary_size: int) -> None:
    """Raise ValueError if the `.bin` file of a pair, looked at in evenly spaced pieces, has tokens of other words."""
    with open(f"{prefix}.idx", "rb") as file:
        *_, token, _, _ = _HEADER.unpack(file.read(_HEADER.size))
    tokens = np.memmap(f"{prefix}.bin", _TOKENS[token], mode="r")
    pieces = [tokens[piece] for piece in _pieces(len(tokens))]
    lowest, highest = min(piece.min() for piece in pieces), max(piece.max() for piece in pieces)
    if lowest < 0 or highest >= vocabulary_size:
        raise ValueError(
            f"{flag} {prefix}: {prefix}.bin holds tokens from {lowest} to {highest}, but the vocabulary ends at "
            f"{vocabulary_size - 1}; give the tokenizer that made the data"
        )


def _is_consistent(lengths: NDArray[Any], positions: NDArray[Any], documents: NDArray[Any], width: int) -> bool:
    """Whether sequences of tokens of `width` bytes follow one another, and documents begin at sequences.

    Looks at evenly spaced pieces of an index with billions of sequences.
    """
    for piece in _pieces(len(lengths)):
        ends = positions[piece] + width * lengths[piece].astype(np.int64)
        if lengths[piece].min() < 0 or (positions[piece][1:] != ends[:-1]).any():
            return False
    if positions[0] != 0 or len(documents) and (documents[0] < 0 or documents[-1] != len(lengths)):
        return False
    return all((np.diff(documents[piece]) >= 0).all() for piece in _pieces(len(documents)))


def _pieces(size: int) -> list[slice]:
    """Evenly spaced pieces of so many numbers, that overlap where there are few."""
    starts = sorted({size * piece // _PIECES for piece in range(_PIECES)})
    return [slice(start, start + _PIECE) for start in starts]
