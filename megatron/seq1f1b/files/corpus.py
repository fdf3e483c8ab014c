"""The PREFIX.bin and PREFIX.idx pair of a corpus, in Megatron's format."""

import os
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from .reading import reason

INDEX = b"MMIDIDX\x00\x00"  # how an index starts
_HEADER = Struct(f"<{len(INDEX)}sQBQQ")
HEADER_BYTES = _HEADER.size
_VERSION = 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # by Megatron's code of the type
_LENGTH = Struct("<i")
_POINTER = Struct("<q")
_WAY_OUT = "copy the corpus again, or make it again with seq1f1b preprocess"


class IndexHeader(NamedTuple):
    """The first bytes of an index, which the lengths of the sequences follow."""

    start: bytes  # INDEX
    version: int
    token_type: int  # Megatron's code of it
    num_sequences: int
    num_documents: int


def header_of(content: bytes) -> IndexHeader | None:
    """The header of an index; None if this is none, or is cut off."""
    if len(content) < HEADER_BYTES or not content.startswith(INDEX):
        return None
    return IndexHeader(*_HEADER.unpack_from(content))


def check_corpus(prefix: str) -> None:
    """Raise ValueError if an index is of another format, or if it or its tokens are cut off, which Megatron notices
    only in the step that reads there. Reads the header and the last sequence, however large the corpus is."""
    index = f"{prefix}.idx"
    try:
        last_token = _end_of_tokens(index)
        size = os.path.getsize(f"{prefix}.bin")
    except OSError as error:
        raise ValueError(f"{error.filename}: {reason(error)}; {_WAY_OUT}") from None
    if size < last_token:
        raise ValueError(
            f"{prefix}.bin: it is cut off, since it has {size:,} bytes, and its index needs {last_token:,}; {_WAY_OUT}"
        )


def _end_of_tokens(index: str) -> int:
    """The number of bytes that the tokens take by their index."""
    with Path(index).open("rb") as file:
        header = header_of(file.read(HEADER_BYTES))
        if header is None:
            raise ValueError(f"{index}: it is no index of a corpus of Megatron; {_WAY_OUT}")
        _, version, code, num_sequences, num_documents = header
        if version != _VERSION or code not in _TOKEN_BYTES:
            raise ValueError(
                f"{index}: it has version {version} and type {code} of tokens, and Megatron reads version {_VERSION} "
                f"with types {min(_TOKEN_BYTES)} to {max(_TOKEN_BYTES)}; {_WAY_OUT}"
            )
        pointers = HEADER_BYTES + num_sequences * _LENGTH.size
        documents = pointers + num_sequences * _POINTER.size
        end = documents + num_documents * _POINTER.size
        size = os.fstat(file.fileno()).st_size
        if size < end:
            raise ValueError(f"{index}: it is cut off, since it has {size:,} bytes in place of {end:,}; {_WAY_OUT}")
        if num_sequences == 0:
            return 0
        file.seek(pointers - _LENGTH.size)
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        file.seek(documents - _POINTER.size)
        (pointer,) = _POINTER.unpack(file.read(_POINTER.size))
    return int(pointer + length * _TOKEN_BYTES[code])
