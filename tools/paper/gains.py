"""What this package gains over published schedules on the same devices, predicted: the best of each by the planner."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.planner import Candidate, Plan, Question, Search, preset

# Model, GPUs, tokens of a sequence.
CASES = (
    ("7b", 8, 32768),
    ("7b", 32, 131072),
    ("7b", 32, 1048576),
    ("30b", 64, 131072),
    ("30b", 256, 1048576),
    ("llama3-70b", 256, 131072),
    ("llama3-70b", 1024, 131072),
    ("llama3-70b", 1024, 1048576),
)
TOKENS = 4 << 20  # of a step
MACHINE = "h100-80gb"


def _is_megatrons(candidate: Candidate) -> bool:
    """1F1B and its interleaved form, on whole sequences."""
    return len(candidate.setup.segments) == 1 and candidate.setup.family == "1f1b"


def _is_published(candidate: Candidate) -> bool:
    """Megatron's own, ZB-H1 on whole sequences, and Seq1F1B cut in its own way."""
    setup = candidate.setup
    if len(setup.segments) == 1:
        return setup.family in ("1f1b", "zb-h1")
    return setup.family == "1f1b" and candidate.strategy == "uniform_comp" and setup.placement.num_chunks <= 2


# What each column of the table may take.
COLUMNS: dict[str, Callable[[Candidate], bool]] = {
    "Megatron": _is_megatrons,
    "published": _is_published,
    "this package": lambda candidate: True,
}


@dataclass(frozen=True)
class Case:
    """The best of every column; None where nothing fits."""

    model: str
    gpus: int
    length: int
    batch: int
    best: dict[str, Plan | None]

    def gain(self, over: str) -> float | None:
        """The relative gain in throughput."""
        other, ours = self.best[over], self.best["this package"]
        return None if other is None or ours is None else other.prediction.seconds / ours.prediction.seconds - 1


def question_of(model: str, gpus: int, length: int) -> Question:
    """Fewer choices than `seq1f1b plan` has, since there are dozens of cases."""
    return Question(
        preset(model),
        read_machine(MACHINE),
        gpus,
        length,
        max(TOKENS // length, 1),
        families=("1f1b", "zb-h1", "auto"),
        segments=(1, 4, 16),
        micro_batches=(1,),
    )


def case(model: str, gpus: int, length: int) -> Case:
    question = question_of(model, gpus, length)
    search = Search(question)
    best: dict[str, Plan | None] = {}
    for name, accept in COLUMNS.items():
        best[name] = next(iter(search.best(1, accept=accept)), None)
    return Case(model, gpus, length, question.global_batch_size, best)


def cases(progress: Callable[[str], None] = lambda text: None) -> Iterator[Case]:
    for model, gpus, length in CASES:
        found = case(model, gpus, length)
        progress(f"{model}, {gpus} GPUs, {length} tokens: {found.gain('published')}\n")
        yield found
