"""A rehearsal's report as text for a terminal."""

from collections.abc import Iterator, Sequence

from ..report.text import aligned
from .ledger import Category, at
from .report import GIB, MIB, RehearsalReport, StageReport, in_words

CANNOT_PROVE = (
    "how NCCL orders and times the messages: here none ever waits. Both ends have the same order by construction; "
    "schedule/lowering.py shows why that cannot hang",
    "the numbers: tensors have no values here, so neither losses nor overflows",
    "the kernels: that each one runs on your GPUs, how fast, and what it allocates for the time of its call, but for "
    "the backward of flash attention, which is counted",
    "fragmentation of the allocator, which takes a few per cent where sizes vary",
    "the other ranks of a stage, which are taken to be like the one that was rehearsed",
)


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
        yield (
            f"Memory: does not fit. Over {report.device_memory / GIB:.4g} GiB: pipeline rank{'s' * (len(numbers) > 1)} "
            f"{', '.join(numbers)}. Rank {number} needs most: {in_words(fullest.needed)}, "
            f"{at(fullest.fullest.name)}, {_largest(fullest)}."
        )
        yield "`seq1f1b plan` looks for a configuration that fits."
    yield ""
    yield from _bullets("Stood for by something else here:", report.notes)
    yield from _bullets("Not proved by a rehearsal:", CANNOT_PROVE)


def _table(report: RehearsalReport) -> Iterator[str]:
    is_large = report.fullest.needed >= GIB
    amount, unit = (_gib, "GiB") if is_large else (_mib, "MiB")
    used = [category for category in Category if any(stage.fullest.peak.get(category) for stage in report.stages)]
    header = ["rank", "stages", "layers", "parameters", *used, "outside", "in all", "fullest at"]
    rows = [
        [
            str(number),
            _span(stage.stages),
            str(stage.num_layers),
            f"{stage.num_parameters / 1e9:.3f} B" if stage.num_parameters >= 1e7 else f"{stage.num_parameters:,}",
            *(amount(stage.fullest.peak.get(category, 0)) for category in used),
            amount(stage.outside),
            amount(stage.needed) + ("" if stage.needed <= report.device_memory else " !"),
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


def _largest(stage: StageReport) -> str:
    """The category that takes most at the fullest moment."""
    category, size = max(stage.fullest.peak.items(), key=lambda item: item[1])
    return f"of which {category} {in_words(size)}"


def _bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
        yield from (f"  - {line}." for line in lines)


def _span(stages: Sequence[int]) -> str:
    return ",".join(map(str, stages))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}"
