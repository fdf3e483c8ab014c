"""What a rehearsal found: per stage, as a whole against the memory of a device, and as text for a terminal.

Both ends of a channel must agree on its messages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from ..planning.costs.machine import GIB, MIB, in_words
from ..report.colours import NAMES
from ..report.text import aligned
from ..schedule import parse_action
from .ledger import Category, Moment

CANNOT_PROVE = (
    "how NCCL orders and times the messages: here none ever waits. Both ends have the same order by construction; "
    "schedule/lowering.py shows why that cannot hang",
    "messages on their way: each is counted as gone when it is sent, and stays until the other rank takes it",
    "the numbers: tensors have no values here, so neither losses nor overflows",
    "the kernels: that each one runs on your GPUs, how fast, and what it allocates for the time of its call, but for "
    "the backward of flash attention, which is counted",
    "fragmentation of the allocator, which takes a few per cent where sizes vary",
    "the other ranks of a stage, which are taken to be like the one that was rehearsed",
)
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


@dataclass(frozen=True)
class StageReport:
    """What the rehearsal of one pipeline rank found.

    `rank` is the global rank that was rehearsed, `stages` those that it holds. `outside` counts the bytes of a GPU
    beside all tensors, by formula, `host_bytes` the activations that wait in the memory of the host.
    """

    rank: int
    stages: list[int]
    num_layers: int
    num_parameters: int
    moments: list[Moment]
    sent: list[Message]
    received: list[Message]
    outside: int
    host_bytes: int = 0

    @property
    def fullest(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def needed(self) -> int:
        """Bytes of the device at the fullest moment."""
        return self.fullest.peak_bytes + self.outside

    def __str__(self) -> str:
        return f"{in_words(self.needed)}, {at(self.fullest.name)}"


@dataclass(frozen=True)
class RehearsalReport:
    """All stages of one pipeline, in their order; `device_memory` in bytes, `launch` describes the launch."""

    launch: str
    device_memory: int
    stages: list[StageReport]
    notes: list[str]

    @property
    def fullest(self) -> StageReport:
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def mismatches(self) -> list[str]:
        """One sentence, without its full stop, for each channel on which both ends disagree."""
        received = [message for stage in self.stages for message in stage.received]
        return mismatches(self._sent, received)

    @property
    def _sent(self) -> list[Message]:
        return [message for stage in self.stages for message in stage.sent]

    @property
    def lack_of_memory(self) -> list[str]:
        """One sentence, without its full stop, if there are stages that do not fit."""
        fullest, limit = self.fullest, f"the {self.device_memory / GIB:.4g} GiB of --device-memory"
        numbers = [str(number) for number, stage in enumerate(self.stages) if stage.needed > self.device_memory]
        if not numbers:
            return []
        largest, size = max(fullest.fullest.peak.items(), key=lambda item: item[1])
        most = f"{fullest}, of which {largest} {in_words(size)}"
        if len(numbers) == 1:
            return [f"pipeline rank {numbers[0]} needs more than {limit}: {most}"]
        names = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        return [f"pipeline ranks {names} need more than {limit}, rank {self.stages.index(fullest)} most: {most}"]

    @property
    def problems(self) -> list[str]:
        """Why the launch cannot work, each in one sentence without its full stop."""
        return self.mismatches + self.lack_of_memory

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        return {
            "launch": self.launch,
            "device_memory": self.device_memory,
            "fits": not self.lack_of_memory,
            "problems": self.problems,
            "notes": self.notes,
            "pipeline_ranks": [
                asdict(stage) | {"fullest": asdict(stage.fullest), "needed": stage.needed} for stage in self.stages
            ],
        }

    def as_text(self) -> str:
        """The table, the verdict, and what they do not cover."""
        lines = [f"Rehearsed: {self.launch}", "", *self._table(), "", self._messages(), self._memory()]
        most = max(stage.host_bytes for stage in self.stages)
        if most:
            lines.append(f"Memory of the host: up to {in_words(most)} a rank, for activations.")
        lines.append("")
        for title, notes in (
            ("Stood for by something else here:", self.notes),
            ("Not proved by a rehearsal:", CANNOT_PROVE),
        ):
            lines += [title, *(f"  - {note}." for note in notes)] if notes else []
        return "\n".join(lines)

    def _table(self) -> Iterator[str]:
        one, unit = (GIB, "GiB") if self.fullest.needed >= GIB else (MIB, "MiB")
        used = [category for category in Category if any(category in stage.fullest.peak for stage in self.stages)]
        titles = ["rank", "stages", "layers", "parameters", *used, "outside", "in all", "fullest at"]
        words = [title.split(" ") for title in titles]
        height = max(map(len, words))
        header = [[""] * (height - len(title)) + title for title in words]
        rows = [
            [
                str(number),
                ",".join(map(str, stage.stages)),
                str(stage.num_layers),
                f"{stage.num_parameters / 1e9:.3f} B" if stage.num_parameters >= 1e7 else f"{stage.num_parameters:,}",
                *(f"{stage.fullest.peak.get(category, 0) / one:.2f}" for category in used),
                f"{stage.outside / one:.2f}",
                f"{stage.needed / one:.2f}" + ("" if stage.needed <= self.device_memory else " !"),
                stage.fullest.name,
            ]
            for number, stage in enumerate(self.stages)
        ]
        text = aligned([*zip(*header, strict=True), *rows])
        text.insert(height, "─" * max(map(len, text)))
        yield from text
        yield (
            f"{unit} at the fullest moment of each pipeline rank; 'outside' is by formula: CUDA context, NCCL, cuBLAS."
        )

    def _messages(self) -> str:
        sent = self._sent
        if self.mismatches or not sent:
            return f"Messages: {'; '.join(self.mismatches) or 'none'}."
        channels = len({message.queue for message in sent})
        return (
            f"Messages: {len(sent):,} on {channels} channel{'s' * (channels > 1)}, the largest of "
            f"{in_words(max(message.num_bytes for message in sent))}; both ends of each agree on their number, order, "
            "shapes and types."
        )

    def _memory(self) -> str:
        if self.lack_of_memory:
            return f"Memory: {self.lack_of_memory[0]}. `seq1f1b plan` looks for a configuration that fits."
        return (
            f"Memory: fits. Pipeline rank {self.stages.index(self.fullest)} needs most: {self.fullest}; "
            f"{in_words(self.device_memory - self.fullest.needed)} of {self.device_memory / GIB:.4g} GiB stay free."
        )


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
