"""The messages of a step: both ends of a channel must agree on them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from ..report.colours import NAMES
from ..schedule import parse_action

_OTHER_MOMENTS = {
    "build": "while the model is built",
    "first optimizer step": "in the first step of the optimizer",
    "step begins": "before the first forward",
    "optimizer step": "in the step of the optimizer",
}


def at(moment: str) -> str:
    """When something happens, in words: `2F3.1` is in the forward of stage 2 for segment 1 of micro-batch 3."""
    if moment in _OTHER_MOMENTS:
        return _OTHER_MOMENTS[moment]
    kind, stage, microbatch, segment = parse_action(moment.removeprefix("after "))
    when = "after" if moment.startswith("after ") else "in"
    return f"{when} the {NAMES[kind]} of stage {stage} for segment {segment} of micro-batch {microbatch}"


@dataclass(frozen=True)
class Message:
    """One message on a channel: a queue without tags from one global rank to another, in one process group."""

    source: int
    destination: int
    channel: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    moment: str

    @property
    def queue(self) -> tuple[int, int, str]:
        return self.source, self.destination, self.channel

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {at(self.moment)}"


def mismatches(sent: Iterable[Message], received: Iterable[Message]) -> list[str]:
    """One sentence, without its full stop, for each channel on which both ends disagree.

    `sent` and `received` have the messages of all ranks, those of each rank in its order.
    """
    ends: dict[tuple[int, int, str], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for side, messages in enumerate((sent, received)):
        for message in messages:
            ends[message.queue][side].append(message)
    return [sentence for queue in sorted(ends) if (sentence := _mismatch(*ends[queue]))]


def _mismatch(sent: list[Message], received: list[Message]) -> str | None:
    for number, (one, other) in enumerate(zip_longest(sent, received)):
        first = one or other
        between = f"from rank {first.source} to rank {first.destination} ({first.channel})"
        if one is None or other is None:
            return (
                f"{len(sent)} messages are sent {between}, but {len(received)} received; the first without a partner "
                f"is {first}"
            )
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"message {number} {between} is sent as {one}, but received as {other}"
    return None
