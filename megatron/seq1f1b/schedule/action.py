"""The actions of a rank: immutable, with a short text form.

Tested in schedule/test_schedule.py.
"""

import re
import reprlib
from typing import NamedTuple

from .kinds import CHUNK_KINDS, Kind

Unit = tuple[int, int, int]
"""A segment of a micro-batch at a stage: (stage, micro-batch, segment)."""


class Action(NamedTuple):
    """One thing that one rank does.

    `stage` is the position in the depth of the model, 0 to P*C-1. `microbatch` and `segment` count from 0; they are -1
    for the actions of a whole model chunk (CHUNK_KINDS).
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    segment: int = -1

    @property
    def unit(self) -> Unit:
        return self[1:]

    def __str__(self) -> str:
        """`2F3.1`: stage, kind, micro-batch, segment. `2REDUCE` for a whole model chunk."""
        unit = "" if self.kind in CHUNK_KINDS else f"{self.microbatch}.{self.segment}"
        return f"{self.stage}{self.kind.value}{unit}"


# Between the two actions of a pair, see pairs.py.
BESIDE = "|"

_TEXT = re.compile(r"([0-9]{1,9})([A-Z][A-Z_]*)(?:([0-9]{1,9})(?:\.([0-9]{1,9}))?)?")


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; also reads `2F3` as `2F3.0`. Raises ValueError for any other text."""
    match = _TEXT.fullmatch(text.strip())
    # Only actions of a whole model chunk have no micro-batch.
    if match is None or match[2] not in list(Kind) or (match[2] in CHUNK_KINDS) != (match[3] is None):
        shown = reprlib.repr(text)
        raise ValueError(f"not an action: {shown}; expected a form like 2F3.1, or 2REDUCE for a whole model chunk")
    kind = Kind(match[2])
    stage = int(match[1])
    if kind in CHUNK_KINDS:
        return Action(kind, stage)
    return Action(kind, stage, microbatch=int(match[3]), segment=int(match[4] or 0))
