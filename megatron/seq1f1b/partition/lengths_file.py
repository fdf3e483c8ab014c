"""A split that a file gives: the lengths of its segments."""

import json
import re
from pathlib import Path

from .cut_positions import PartitionError


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Lengths in tokens, first to last: a JSON list, or numbers separated by spaces, commas or new lines.

    In text, what follows a '#' on a line is a comment. Raises PartitionError if there is no such list of positive
    integers.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PartitionError(
            f"--sequence-split-file {path} cannot be read ({error}); give a text or JSON file"
        ) from error
    try:
        lengths = json.loads(text)
    except (ValueError, RecursionError):
        words = re.split(r"[\s,]+", re.sub(r"#.*", "", text).strip(" \t\r\n,[]"))
        lengths = [int(word) if word.isascii() and word.isdigit() and len(word) < 12 else word for word in words]
    if isinstance(lengths, int):
        lengths = [lengths]
    if not isinstance(lengths, list) or not all(type(x) is int and x > 0 for x in lengths) or not lengths:
        raise PartitionError(
            f"--sequence-split-file {path} must hold the lengths of the segments in tokens, positive integers such as "
            "'4096 2048 2048' or [4096, 2048, 2048]; correct the file"
        )
    return tuple(lengths)


def check_lengths(
    lengths: tuple[int, ...], path: str | Path, sequence_length: int, num_segments: int | None, multiple_of: int
) -> None:
    """Raises PartitionError if the lengths do not fit the sequence, `--sequence-splits` or the parallel sizes."""
    if sum(lengths) != sequence_length:
        raise PartitionError(
            f"the lengths in --sequence-split-file {path} add up to {sum(lengths)}, not to --seq-length "
            f"{sequence_length}; correct the file or --seq-length"
        )
    if num_segments not in (None, len(lengths)):
        raise PartitionError(
            f"--sequence-split-file {path} holds {len(lengths)} segments, not --sequence-splits {num_segments}; drop "
            "--sequence-splits, the file is enough"
        )
    odd = [length for length in lengths if length % multiple_of]
    if odd:
        raise PartitionError(
            f"--sequence-split-file {path} holds a segment of {odd[0]} tokens, which is not a multiple of "
            f"{multiple_of}, the size that segments are rounded to under --sequence-parallel; correct the file"
        )
