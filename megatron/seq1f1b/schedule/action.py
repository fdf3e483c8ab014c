"""The actions of a rank: immutable, with a short text form."""

import re
import reprlib
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of action. The value is the word of the text form."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # input-gradient half of the backward  # noqa: E741 - the field's name
    W = "W"  # weight-gradient half of the backward

    # Added by lowering. The stage is the one on this rank whose compute they serve.
    RECV_F = "RECV_F"  # post the receive of the input of F(stage), sent by stage - 1
    SEND_F = "SEND_F"  # send the output of F(stage) to stage + 1
    RECV_B = "RECV_B"  # post the receive of the output gradient of B/I(stage), from stage + 1
    SEND_B = "SEND_B"  # send the input gradient of B/I(stage) to stage - 1
    GATHER = "GATHER"  # start gathering the parameters of a model chunk
    REDUCE = "REDUCE"  # start reducing the gradients of a model chunk
    OFFLOAD = "OFFLOAD"  # start moving the activations of F(stage) to host memory
    RELOAD = "RELOAD"  # start bringing them back for B/I(stage)
    RELEASE = "RELEASE"  # free the parameters of a model chunk, where the state is partitioned

    # A member equals its value, so it may hash like it; Enum's own hash is slow Python code.
    __hash__ = str.__hash__


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
CHUNK_KINDS = (Kind.GATHER, Kind.REDUCE, Kind.RELEASE)
MOVE_KINDS = (Kind.OFFLOAD, Kind.RELOAD)


class Action(NamedTuple):
    """One thing that one rank does.

    `stage` is the position in the depth of the model, 0 to P*C-1. `microbatch` and `segment` count from 0; they are -1
    for the actions of a whole model chunk (CHUNK_KINDS).
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    segment: int = -1

    def __str__(self) -> str:
        """`2F3.1`: stage, kind, micro-batch, segment. `2REDUCE` for a whole model chunk."""
        unit = "" if self.kind in CHUNK_KINDS else f"{self.microbatch}.{self.segment}"
        return f"{self.stage}{self.kind.value}{unit}"


_TEXT = re.compile(r"([0-9]{1,9})([A-Z][A-Z_]*)(?:([0-9]{1,9})(?:\.([0-9]{1,9}))?)?")


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; also reads `2F3` as `2F3.0`. Raises ValueError for any other text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in list(Kind) or (match[2] in CHUNK_KINDS) != (match[3] is None):
        shown = reprlib.repr(text)
        raise ValueError(f"not an action: {shown}; expected a form like 2F3.1, or 2REDUCE for a whole model chunk")
    kind, stage = Kind(match[2]), int(match[1])
    return Action(kind, stage) if kind in CHUNK_KINDS else Action(kind, stage, int(match[3]), int(match[4] or 0))
