"""A partition from a file: the lengths of the segments."""

import re
from pathlib import Path

_FLAG = "--sequence-split-file"


def read_lengths(lengths_file: str | Path) -> tuple[int, ...]:
    """Lengths in tokens, first to last: a JSON list, or numbers separated by spaces, commas or new lines.

    In text, what follows a '#' on a line is a comment. Raises ValueError if there is no such list of positive
    integers.
    """
    try:
        text = Path(lengths_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{_FLAG} {lengths_file} cannot be read ({reason}); give a text or JSON file") from error
    words = re.split(r"[\s,]+", re.sub(r"#.*", "", text).strip(" \t\r\n,[]"))
    # No sequence has 10^12 tokens, and longer numbers cannot be converted.
    lengths = tuple(int(word) if word.isascii() and word.isdigit() and len(word) < 12 else 0 for word in words)
    if not all(lengths):
        raise ValueError(
            f"{_FLAG} {lengths_file} must hold the lengths of the segments in tokens, positive integers such as "
            "'4096 2048 2048' or [4096, 2048, 2048]; correct the file"
        )
    return lengths


def check_lengths(
    lengths: tuple[int, ...],
    lengths_file: str | Path,
    sequence_length: int,
    num_segments: int | None,
    multiple_of: int,
) -> None:
    """Raises ValueError if the lengths do not fit the sequence, the number of segments or the parallel sizes."""
    if sum(lengths) != sequence_length:
        raise ValueError(
            f"the lengths in {_FLAG} {lengths_file} add up to {sum(lengths)}, not to --seq-length {sequence_length}; "
            "correct the file or --seq-length"
        )
    if num_segments not in (None, len(lengths)):
        raise ValueError(
            f"{_FLAG} {lengths_file} holds {len(lengths)} segments, not --sequence-splits {num_segments}; drop "
            "--sequence-splits, the file is enough"
        )
    odd = [length for length in lengths if length % multiple_of]
    if odd:
        raise ValueError(
            f"{_FLAG} {lengths_file} holds a segment of {odd[0]} tokens, which is not a multiple of {multiple_of}, as "
            "sequence parallelism needs; correct the file"
        )
