"""The documents of packed sequences in a rehearsal, whose tokens have no values."""

from itertools import accumulate
from typing import Any

from ..model import Documents

_SHARES = (0.4, 0.3, 0.2)  # of a sequence; one more document has the rest


def _lengths(sequence_length: int) -> list[int]:
    lengths = [max(1, int(share * sequence_length)) for share in _SHARES]
    return [*lengths, sequence_length - sum(lengths)]


def in_lengths(sequence_length: int) -> str:
    """The lengths of all documents of a sequence, in words."""
    *lengths, last = map(str, _lengths(sequence_length))
    return f"documents of {', '.join(lengths)} and {last}"


def documents_of_step(batches: Any, shape: tuple[int, int, int], *_: Any) -> list[Documents]:
    """Those of every micro-batch, as the function of the same name in the runtime finds them in batches.

    `shape` = (micro-batches, sequences, tokens).
    """
    num_microbatches, num_sequences, sequence_length = shape
    starts = tuple(accumulate(_lengths(sequence_length)[:-1], initial=0))
    return [(starts,) * num_sequences] * num_microbatches
