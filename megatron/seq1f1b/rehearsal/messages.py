"""The messages that each pipeline rank would exchange, and whether both ends agree on them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .ledger import at


class Message(NamedTuple):
    """One message on a channel: a queue without tags from one global rank to another, in one process group."""

    source: int
    destination: int
    channel: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    moment: str

    @property
    def form(self) -> tuple[tuple[int, ...], str]:
        """What both ends must agree on."""
        return self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {at(self.moment)}"


class Traffic(NamedTuple):
    """The sends and the posted receives of one rank, each in its order."""

    sent: list[Message]
    received: list[Message]


def mismatches(traffic: Mapping[int, Traffic]) -> list[str]:
    """One sentence, without its full stop, for each channel whose ends disagree; `traffic` by global rank."""
    sent, received = defaultdict(list), defaultdict(list)
    for one_rank in traffic.values():
        for message in one_rank.sent:
            sent[message[:3]].append(message)
        for message in one_rank.received:
            received[message[:3]].append(message)
    found = (_mismatch(channel, sent[channel], received[channel]) for channel in sorted({*sent, *received}))
    return [sentence for sentence in found if sentence is not None]


def _mismatch(channel: tuple[int, int, str], sent: Sequence[Message], received: Sequence[Message]) -> str | None:
    source, destination, name = channel
    between = f"from rank {source} to rank {destination} ({name})"
    for number, (one, other) in enumerate(zip(sent, received, strict=False)):
        if one.form != other.form:
            return f"message {number} {between} is sent as {one}, but received as {other}"
    if len(sent) != len(received):
        more, index = (sent, len(received)) if len(sent) > len(received) else (received, len(sent))
        return (
            f"{len(sent)} messages are sent {between}, but {len(received)} received; the first without a partner is "
            f"{more[index]}"
        )
    return None
