"""The results of a rehearsal by stage, their verdict, as text and as JSON. Both ends of a channel must agree."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from ..report.style import BOXES
from ..report.text import GIB, MIB, aligned, in_words
from ..schedule import parse_action
from .ledger import Category, MessageEnd, Moment

CANNOT_PROVE = (
    "how NCCL orders and times the messages: here none ever waits. schedule/lowering.py shows why that cannot hang",
    "messages on their way: each is counted as gone when it is sent, but stays until the other rank takes it",
    "the numbers: tensors have no values here, so neither losses nor overflows",
    "the kernels: whether and how fast each one runs, and its temporaries, except flash attention's in the backward",
    "fragmentation of the allocator, which takes a few per cent where sizes vary",
    "the other ranks of a stage: each is assumed to be like the rehearsed one",
)


@dataclass(frozen=True)
class StageReport:
    """The results of one pipeline rank; bytes `outside` all tensors are by formula, `host_bytes` hold activations."""

    rank: int
    stages: list[int]
    num_parameters: int
    moments: list[Moment]
    sent: list[MessageEnd]
    received: list[MessageEnd]
    outside: int
    host_bytes: int = 0

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def needed(self) -> int:
        """Bytes of the device at the fullest moment."""
        return self.fullest.peak_bytes + self.outside


class RehearsalReport:
    """All stages of one pipeline, in their order; `device_memory` is in bytes. Each of `problems` is a reason why the
    launch cannot work, a sentence without its full stop."""

    def __init__(self, launch: str, device_memory: int, stages: list[StageReport], notes: list[str]) -> None:
        self.launch = launch
        self.device_memory = device_memory
        self.stages = stages
        self.notes = notes
        self._sent = [message for stage in stages for message in stage.sent]
        self._mismatches = mismatches(self._sent, (message for stage in stages for message in stage.received))
        number, stage = max(enumerate(stages), key=lambda numbered: numbered[1].needed)
        largest, size = max(stage.fullest.peak.items(), key=lambda item: item[1])
        most = f"{in_words(stage.needed)} on pipeline rank {number}"
        moment = moment_in_words(stage.fullest.name)
        self._most = f"{most}, {moment}, {in_words(size)} of it {largest}"
        self._free = device_memory - stage.needed
        self.problems = list(self._mismatches)
        if self._free < 0:
            num_full = sum(stage.needed > device_memory for stage in stages)
            self.problems.append(
                f"the {device_memory / GIB:.4g} GiB of --device-memory are too few for {num_full} of {len(stages)} "
                f"pipeline ranks: {self._most}"
            )

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        return {
            "launch": self.launch,
            "device_memory": self.device_memory,
            "fits": self._free >= 0,
            "problems": self.problems,
            "notes": self.notes,
            "pipeline_ranks": [
                asdict(stage) | {"fullest": asdict(stage.fullest), "needed": stage.needed} for stage in self.stages
            ],
        }

    def as_text(self) -> str:
        """The table, the verdict, and what they do not cover."""
        lines = [f"Rehearsed: {self.launch}", "", *self._table(), "", *self._verdict(), ""]
        if self.notes:
            lines.append("Replaced in this rehearsal:")
            lines += [f"  - {note}." for note in self.notes]
        lines.append("Not proved by a rehearsal:")
        lines += [f"  - {note}." for note in CANNOT_PROVE]
        return "\n".join(lines)

    def _table(self) -> Iterator[str]:
        unit = "GiB" if max(stage.needed for stage in self.stages) >= GIB else "MiB"
        bytes_of_unit = GIB if unit == "GiB" else MIB
        used = [category for category in Category if any(category in stage.fullest.peak for stage in self.stages)]
        titles = ["rank", "stages", "parameters", *used, "outside", "in all", "fullest at"]
        # A title has a line for each of its words, the last one above the numbers.
        words = [title.split(" ") for title in titles]
        height = max(map(len, words))
        columns = [[""] * (height - len(title)) + title for title in words]
        header = list(zip(*columns, strict=True))
        rows = []
        for number, stage in enumerate(self.stages):
            parameters = f"{stage.num_parameters:,}"
            if stage.num_parameters >= 1e7:
                parameters = f"{stage.num_parameters / 1e9:.3f} B"
            mark = " !" if stage.needed > self.device_memory else ""
            rows.append(
                (
                    str(number),
                    ",".join(map(str, stage.stages)),
                    parameters,
                    *(f"{stage.fullest.peak.get(category, 0) / bytes_of_unit:.2f}" for category in used),
                    f"{stage.outside / bytes_of_unit:.2f}",
                    f"{stage.needed / bytes_of_unit:.2f}{mark}",
                    stage.fullest.name,
                )
            )
        lines = aligned([*header, *rows])
        lines.insert(height, "─" * max(map(len, lines)))
        yield from lines
        yield (
            f"{unit} at the fullest moment of each pipeline rank; 'outside' is by formula: CUDA context, NCCL, cuBLAS."
        )

    def _verdict(self) -> Iterator[str]:
        channels = len({(message.source, message.destination, message.channel) for message in self._sent})
        if self._mismatches or not channels:
            yield f"Messages: {'; '.join(self._mismatches) or 'none'}."
        else:
            channels_in_words = "1 channel" if channels == 1 else f"{channels} channels"
            yield (
                f"Messages: {len(self._sent):,} on {channels_in_words}, the largest of "
                f"{in_words(max(message.num_bytes for message in self._sent))}; both ends of each agree on their "
                "number, order, shapes and types."
            )
        if self._free < 0:
            yield f"Memory: {self.problems[-1]}. `seq1f1b plan` looks for a configuration that fits."
        else:
            all_gib = f"{self.device_memory / GIB:.4g} GiB"
            yield f"Memory: fits. At most {self._most}; {in_words(self._free)} of {all_gib} stay free."
        on_host = max(stage.host_bytes for stage in self.stages)
        if on_host:
            yield f"Memory of the host: up to {in_words(on_host)} a rank, for activations."


def moment_in_words(moment: str) -> str:
    """A moment in words: `2F3.1` is in the forward of stage 2 for segment 1 of micro-batch 3."""
    action = moment.removeprefix("after ")
    if not action[0].isdigit():
        return f"at the {moment}"
    kind, stage, microbatch, segment = parse_action(action)
    when = "in" if action == moment else "after"
    return f"{when} the {BOXES[kind].name} of stage {stage} for segment {segment} of micro-batch {microbatch}"


def mismatches(sent: Iterable[MessageEnd], received: Iterable[MessageEnd]) -> list[str]:
    """A sentence, without its full stop, for each channel on which both ends disagree."""
    sent_on = _by_channel(sent)
    received_on = _by_channel(received)
    sentences = []
    for channel in sorted(sent_on.keys() | received_on.keys()):
        sentence = _mismatch(*channel, sent_on.get(channel, []), received_on.get(channel, []))
        if sentence is not None:
            sentences.append(sentence)
    return sentences


def _by_channel(messages: Iterable[MessageEnd]) -> dict[tuple[int, int, str], list[MessageEnd]]:
    """The messages in order by source, destination and channel."""
    by_channel = defaultdict(list)
    for message in messages:
        by_channel[message.source, message.destination, message.channel].append(message)
    return by_channel


def _mismatch(
    source: int, destination: int, channel: str, sent: list[MessageEnd], received: list[MessageEnd]
) -> str | None:
    between = f"from rank {source} to rank {destination} ({channel})"
    for number, (one, other) in enumerate(zip_longest(sent, received)):
        if one is None or other is None:
            return (
                f"{len(sent)} messages are sent {between}, but {len(received)} received; the first without a partner "
                f"is {_in_words(one or other)}"
            )
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"message {number} {between} is sent as {_in_words(one)}, but received as {_in_words(other)}"
    return None


def _in_words(message: MessageEnd) -> str:
    return f"{message.dtype} {list(message.shape)} {moment_in_words(message.moment)}"
