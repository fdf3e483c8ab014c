"""Lengths in tokens: of the segments of a sequence, and of the sequences of a corpus.

Tested in commands/test_bad_input.py by test_one_sentence.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from .corpus import HEADER_BYTES, INDEX, header_of
from .reading import read_bytes, read_text
from .typed import Count, converted, with_way_out

_Tokens = Annotated[int, Meta(ge=1, lt=10**8)]
_MOST_OF_INDEX = 2**33  # bytes, of some 400 million sequences


class _Row(Struct):
    tokens: _Tokens
    sequences: Count = 1


def read_segment_lengths(path: str | Path) -> tuple[int, ...]:
    """Lengths in tokens, first to last: a JSON list, or numbers separated by spaces, commas or new lines, with comments
    after '#'. Raises ValueError for anything else."""
    try:
        words = re.split(r"[\s,]+", re.sub(r"#.*", "", read_text(path)).strip(" \t\r\n,[]"))
        if words == [""]:
            raise ValueError(f"{path}: it has no lengths")
        return tuple(converted(path, words, list[_Tokens], "lengths", is_text=True))
    except ValueError as error:
        raise with_way_out(error, "give a file with those of the segments in tokens, as '4096 2048 2048'") from None


def read_histogram(path: str | Path) -> Mapping[int, int]:
    """The number of sequences of each length in tokens, from the .idx file of a corpus, or from text with a line
    `tokens,sequences` or `tokens` for each. Raises ValueError for anything else."""
    try:
        content = read_bytes(path, _MOST_OF_INDEX)
        is_index = content.startswith(INDEX)
        text = "" if is_index else read_text(path, content)
    except ValueError as error:
        raise with_way_out(error, "give a CSV of 'tokens,sequences', or the .idx of a corpus") from None
    return _histogram_of_index(path, content) if is_index else _histogram_of_text(path, text)


def _histogram_of_index(path: str | Path, content: bytes) -> Mapping[int, int]:
    header = header_of(content)
    num_sequences = 0 if header is None else header.num_sequences
    sizes = content[HEADER_BYTES : HEADER_BYTES + 4 * num_sequences]
    counts = Counter[int]()
    is_complete = len(sizes) == 4 * num_sequences
    if is_complete:
        counts.update(memoryview(sizes).cast("i"))
    del counts[0]
    if not counts or min(counts) < 0:
        raise ValueError(f"{path}: it is cut off, damaged or without tokens; make the corpus again")
    return counts


def _histogram_of_text(path: str | Path, text: str) -> Mapping[int, int]:
    counts = Counter[int]()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").split()
        is_comment = not words or words[0].startswith("#")
        is_heading = number == 1 and bool(words) and words[0].isalpha()
        if is_comment or is_heading:
            continue
        if len(words) > 2:
            raise ValueError(f"{path}: line {number}: {line.strip()!r} is not 'tokens,sequences'")
        named = dict(zip(("tokens", "sequences"), words, strict=False))
        row = converted(path, named, _Row, f"line {number}: ", is_text=True)
        counts[row.tokens] += row.sequences
    if not counts:
        raise ValueError(f"{path}: it has no lengths; give a line 'tokens,sequences' for each")
    return counts
