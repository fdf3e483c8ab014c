"""What a rehearsal found out: per stage, as a whole against the memory of a device, and as text for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..planning.costs.machine import bytes_outside
from ..report.text import aligned
from .ledger import Category, Moment, at
from .recorder import Traffic, mismatches

GIB = 2**30
MIB = 2**20
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


def in_words(size: int) -> str:
    """Bytes in the unit in which they are easiest to read."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 2**10:.1f} KiB"


@dataclass(frozen=True)
class StageReport:
    """What the rehearsal of one pipeline rank found out.

    `rank` is the global rank that was rehearsed, `stages` those that it holds. `num_communicators` counts the process
    groups of several ranks that it used. `seconds` are those of the rehearsal itself.
    """

    rank: int
    stages: tuple[int, ...]
    num_layers: int
    num_parameters: int
    moments: list[Moment]
    traffic: Traffic
    num_communicators: int
    num_operators: int
    seconds: float
    is_on_gpu: bool = True

    @property
    def fullest(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def outside(self) -> int:
        """Bytes of a GPU that are not counted, by formula."""
        return bytes_outside(self.num_communicators) if self.is_on_gpu else 0

    @property
    def needed(self) -> int:
        """Bytes of the device at the fullest moment."""
        return self.fullest.peak_bytes + self.outside


@dataclass(frozen=True)
class RehearsalReport:
    """All stages of one pipeline, in their order; `device_memory` in bytes, `launch` describes the launch."""

    launch: str
    device_memory: int
    stages: tuple[StageReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> StageReport:
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def too_full(self) -> list[StageReport]:
        """The stages that do not fit."""
        return [stage for stage in self.stages if stage.needed > self.device_memory]

    @property
    def mismatches(self) -> list[str]:
        """One sentence, without its full stop, for each channel whose two ends disagree."""
        return mismatches({stage.rank: stage.traffic for stage in self.stages})

    @property
    def problems(self) -> list[str]:
        """Why the launch cannot work, each in one sentence without its full stop."""
        return self.mismatches + ([self._lack_of_memory()] if self.too_full else [])

    def _lack_of_memory(self) -> str:
        limit = f"the {self.device_memory / GIB:.4g} GiB of --device-memory"
        fullest = self.fullest
        most = f"{in_words(fullest.needed)}, {at(fullest.fullest.name)}"
        numbers = [number for number, stage in enumerate(self.stages) if stage in self.too_full]
        if len(numbers) == 1:
            return f"pipeline rank {numbers[0]} needs more than {limit}: {most}"
        names = ", ".join(map(str, numbers[:-1]))
        return (
            f"pipeline ranks {names} and {numbers[-1]} need more than {limit}, rank {self.stages.index(fullest)} "
            f"most: {most}"
        )

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        return {
            "launch": self.launch,
            "device_memory": self.device_memory,
            "fits": not self.too_full,
            "problems": self.problems,
            "notes": list(self.notes),
            "pipeline_ranks": [_stage_as_json(stage) for stage in self.stages],
        }


def _stage_as_json(stage: StageReport) -> dict[str, Any]:
    data = asdict(stage)
    data["traffic"] = {
        side: [message._asdict() for message in messages] for side, messages in stage.traffic._asdict().items()
    }
    data["moments"] = [moment_as_json(moment) for moment in stage.moments]
    return data | {"fullest": moment_as_json(stage.fullest), "outside": stage.outside, "needed": stage.needed}


def moment_as_json(moment: Moment) -> dict[str, Any]:
    """Sizes in bytes, categories without any left out."""
    sizes = {category.value: moment.peak[category] for category in Category if moment.peak.get(category)}
    return {"name": moment.name, "peak": sizes, "end": moment.end}


def as_text(report: RehearsalReport) -> str:
    """The table, the verdict, and what they do not cover."""
    return "\n".join(_lines(report))


def _lines(report: RehearsalReport) -> Iterator[str]:
    yield f"Rehearsed: {report.launch}"
    yield ""
    yield from _table(report)
    yield ""
    yield _messages(report)
    fullest = report.fullest
    number, free = report.stages.index(fullest), report.device_memory - fullest.needed
    if free >= 0:
        yield (
            f"Memory: fits. Pipeline rank {number} needs most: {in_words(fullest.needed)} of "
            f"{report.device_memory / GIB:.4g} GiB, {at(fullest.fullest.name)}; {in_words(free)} stay free."
        )
    else:
        numbers = [str(report.stages.index(stage)) for stage in report.too_full]
        largest, size = max(fullest.fullest.peak.items(), key=lambda item: item[1])
        yield (
            f"Memory: does not fit. Over {report.device_memory / GIB:.4g} GiB: pipeline rank{'s' * (len(numbers) > 1)} "
            f"{', '.join(numbers)}. Rank {number} needs most: {in_words(fullest.needed)}, "
            f"{at(fullest.fullest.name)}, of which {largest} {in_words(size)}."
        )
        yield "`seq1f1b plan` looks for a configuration that fits."
    yield ""
    yield from _bullets("Stood for by something else here:", report.notes)
    yield from _bullets("Not proved by a rehearsal:", CANNOT_PROVE)


def _table(report: RehearsalReport) -> Iterator[str]:
    one, unit = (GIB, "GiB") if report.fullest.needed >= GIB else (MIB, "MiB")
    used = [category for category in Category if any(stage.fullest.peak.get(category) for stage in report.stages)]
    header = ["rank", "stages", "layers", "parameters", *used, "outside", "in all", "fullest at"]
    rows = [
        [
            str(number),
            ",".join(map(str, stage.stages)),
            str(stage.num_layers),
            f"{stage.num_parameters / 1e9:.3f} B" if stage.num_parameters >= 1e7 else f"{stage.num_parameters:,}",
            *(f"{stage.fullest.peak.get(category, 0) / one:.2f}" for category in used),
            f"{stage.outside / one:.2f}",
            f"{stage.needed / one:.2f}" + ("" if stage.needed <= report.device_memory else " !"),
            stage.fullest.name,
        ]
        for number, stage in enumerate(report.stages)
    ]
    titles = [title.split(" ") for title in header]
    height = max(map(len, titles))
    padded = [[""] * (height - len(words)) + words for words in titles]
    text = aligned([*([words[line] for words in padded] for line in range(height)), *rows])
    text.insert(height, "─" * max(map(len, text)))
    yield from text
    yield f"{unit} at the fullest moment of each pipeline rank; 'outside' is by formula: CUDA context, NCCL, cuBLAS."


def _messages(report: RehearsalReport) -> str:
    sent = [message for stage in report.stages for message in stage.traffic.sent]
    if report.mismatches:
        return "Messages: " + "; ".join(report.mismatches) + "."
    if not sent:
        return "Messages: none."
    largest = max(message.num_bytes for message in sent)
    channels = len({message[:3] for message in sent})
    return (
        f"Messages: {len(sent):,} on {channels} channel{'s' * (channels > 1)}, the largest of {in_words(largest)}; "
        "both ends of each agree on their number, order, shapes and types."
    )


def _bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
        yield from (f"  - {line}." for line in lines)
