"""The kinds of action, and all facts about a kind: what it needs, sends, occupies, holds and frees.

Whatever treats kinds differently asks for a fact here, so a new kind is a row of FACTS. CONTRIBUTING.md has the walk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property
from types import MappingProxyType
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

    @cached_property
    def facts(self) -> "Facts":
        return FACTS[self]


class Lane(Enum):
    """The part of a rank that an action occupies while it runs. Actions of one lane of a rank follow one another."""

    COMPUTE = "compute"
    MESSAGES = "messages"
    COLLECTIVES = "collectives"
    TO_HOST = "copies to the host"
    FROM_HOST = "copies from the host"
    NOTHING = "takes no time"


class Holds(Enum):
    """The content of the device's memory that belongs to a unit at its stage."""

    NOTHING = "nothing"
    ACTIVATIONS = "all that its backward needs"
    FOR_WEIGHTS = "what its W needs"
    ON_HOST = "what stays there while its activations are on the host"

    @property
    def is_counted(self) -> bool:
        """Whether the unit counts as one that its rank holds."""
        return self in (Holds.ACTIVATIONS, Holds.FOR_WEIGHTS)


class Need(NamedTuple):
    """An action that has to end before: its kind, and its stage and segment relative to those of the action."""

    kind: Kind
    stage: int = 0
    segment: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts about a kind of action."""

    lane: Lane
    is_of_chunk: bool = False  # its actions are of a whole model chunk, not of a unit
    in_evaluation: bool = False  # it also runs in a step without backwards

    # Compute actions only.
    needs: tuple[Need, ...] = ()  # where such a stage and segment exist; see `dependencies`
    outcome: Kind | None = None  # the kind that others name in `needs` for what it makes
    receives: Kind | None = None  # how its input comes from another rank, and its output goes to one
    sends: Kind | None = None
    needs_parameters: bool = False
    gives_input_gradient: bool = False
    gives_weight_gradient: bool = False

    # Messages only.
    payload: Kind | None = None  # what is sent: the outcome of this kind
    hop: int = 0  # from the stage of the action to the stage at the other end
    is_send: bool = False

    # What its unit holds before and after it; a forward takes memory at its start, others change it at their end.
    before: Holds = Holds.NOTHING
    after: Holds = Holds.NOTHING

    costs: tuple[str, ...] = ()  # the tables of `Costs` whose times it takes


_BACKWARD_NEEDS = (Need(Kind.F), Need(Kind.B, stage=1), Need(Kind.B, segment=1))

FACTS: Mapping[Kind, Facts] = MappingProxyType(
    {
        Kind.F: Facts(
            lane=Lane.COMPUTE,
            in_evaluation=True,
            needs=(Need(Kind.F, stage=-1), Need(Kind.F, segment=-1)),
            outcome=Kind.F,
            receives=Kind.RECV_F,
            sends=Kind.SEND_F,
            needs_parameters=True,
            after=Holds.ACTIVATIONS,
            costs=("f",),
        ),
        Kind.B: Facts(
            lane=Lane.COMPUTE,
            needs=_BACKWARD_NEEDS,
            outcome=Kind.B,
            receives=Kind.RECV_B,
            sends=Kind.SEND_B,
            needs_parameters=True,
            gives_input_gradient=True,
            gives_weight_gradient=True,
            before=Holds.ACTIVATIONS,
            costs=("i", "w"),
        ),
        Kind.I: Facts(
            lane=Lane.COMPUTE,
            needs=_BACKWARD_NEEDS,
            outcome=Kind.B,  # other stages and segments need only the I of a split B
            receives=Kind.RECV_B,
            sends=Kind.SEND_B,
            needs_parameters=True,
            gives_input_gradient=True,
            before=Holds.ACTIVATIONS,
            after=Holds.FOR_WEIGHTS,
            costs=("i",),
        ),
        Kind.W: Facts(
            lane=Lane.COMPUTE,
            needs=(Need(Kind.B),),
            outcome=Kind.W,
            gives_weight_gradient=True,
            before=Holds.FOR_WEIGHTS,
            costs=("w",),
        ),
        Kind.RECV_F: Facts(lane=Lane.MESSAGES, in_evaluation=True, payload=Kind.F, hop=-1),
        Kind.SEND_F: Facts(
            lane=Lane.MESSAGES, in_evaluation=True, payload=Kind.F, hop=1, is_send=True, costs=("message_f",)
        ),
        Kind.RECV_B: Facts(lane=Lane.MESSAGES, payload=Kind.B, hop=1),
        Kind.SEND_B: Facts(lane=Lane.MESSAGES, payload=Kind.B, hop=-1, is_send=True, costs=("message_b",)),
        Kind.GATHER: Facts(lane=Lane.COLLECTIVES, is_of_chunk=True),
        Kind.REDUCE: Facts(lane=Lane.COLLECTIVES, is_of_chunk=True),
        Kind.RELEASE: Facts(lane=Lane.NOTHING, is_of_chunk=True),
        Kind.OFFLOAD: Facts(lane=Lane.TO_HOST, before=Holds.ACTIVATIONS, after=Holds.ON_HOST),
        Kind.RELOAD: Facts(lane=Lane.FROM_HOST, before=Holds.ON_HOST, after=Holds.ACTIVATIONS),
    }
)
"""All that is known of each kind of action, stated once."""

COMPUTE_KINDS = tuple(kind for kind in Kind if kind.facts.lane is Lane.COMPUTE)
"""Forwards, and backwards whole or in halves."""
MESSAGE_KINDS = tuple(kind for kind in Kind if kind.facts.lane is Lane.MESSAGES)
CHUNK_KINDS = tuple(kind for kind in Kind if kind.facts.is_of_chunk)
"""The actions of a whole model chunk, on its weights or gradients."""
MOVE_KINDS = tuple(kind for kind in Kind if kind.facts.lane in (Lane.TO_HOST, Lane.FROM_HOST))
"""The moves of a unit's activations to the memory of the host, and back."""
PAYLOADS = tuple(kind for kind in Kind if any(message.facts.payload is kind for message in MESSAGE_KINDS))
"""What a message can carry: the output of a forward, or the gradient of its input."""
