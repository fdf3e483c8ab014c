"""How soon a model can be trained on a number of tokens, and what more devices change (arXiv 2106.02679, section 3).

The batch is bounded by a law of the critical batch size. More devices share it among them until pipelines starve: then
a larger batch, or another way to run the pipeline, is what would help.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..costs.memory import GIB
from ..costs.training_setup import parameters_of_model
from ..simulator import predict_long
from .bounds import least_bytes, least_seconds
from .critical_batch import BatchLaw
from .question import Candidate, Question
from .space import scheduled, setups

# Shares of the largest batch that are tried: a smaller one needs fewer tokens.
SHARES = (1.0, 0.5, 0.25)
_DAY = 86400.0
# Beyond this many actions of a short step a candidate takes too long to simulate.
_MOST_ACTIONS = 60_000


@dataclass(frozen=True)
class Training:
    """The configuration that trains soonest on a number of devices."""

    candidate: Candidate
    step_seconds: float
    memory_gib: float
    steps: float
    tokens: float  # with those that the size of the batch costs

    @property
    def devices(self) -> int:
        return self.candidate.setup.num_devices

    @property
    def days(self) -> float:
        return self.steps * self.step_seconds / _DAY

    @property
    def device_hours(self) -> float:
        return 24 * self.days * self.devices


def lean(question: Question) -> Question:
    """The question with only the choices that matter most, so that many numbers of devices can be searched."""
    return replace(
        question,
        families=tuple(name for name in question.families if name in ("1f1b", "breadth-first")),
        strategies=("balanced",),
        segments=tuple(count for count in question.segments if count in (1, 4, 16)),
        chunks=tuple(count for count in question.chunks if count in (1, 4)),
        micro_batches=(1, 2),
    )


def device_counts(question: Question) -> list[int]:
    """From one node on, doubled, up to `question.num_devices`, which comes last."""
    counts, count = [], min(question.machine.devices_per_node, question.num_devices)
    while count < question.num_devices:
        counts.append(count)
        count *= 2
    return [*counts, question.num_devices]


def soonest(
    question: Question,
    tokens: float,
    law: BatchLaw,
    counts: Sequence[int],
    shares: Sequence[float] = SHARES,
    accept: Callable[[Candidate], bool] = lambda _: True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Training | None]:
    """For each number of devices the configuration that trains soonest; None where nothing fits.

    `question.global_batch_size` does not matter: the batch is one of `shares` of the largest by the law, in sequences
    of `question.sequence_length` tokens, rounded so that data parallelism can divide it.
    """
    largest = law.largest(parameters_of_model(question.model), tokens)
    for number, devices in enumerate(counts):
        progress(number, len(counts))
        found = [_soonest(question, tokens, law, largest, devices, share, accept) for share in shares]
        yield min((each for each in found if each is not None), key=lambda each: each.days, default=None)
    progress(len(counts), len(counts))


def _soonest(
    question: Question,
    tokens: float,
    law: BatchLaw,
    largest: float,
    devices: int,
    share: float,
    accept: Callable[[Candidate], bool],
) -> Training | None:
    batch = _divisible(share * largest / question.sequence_length)
    asked = replace(question, num_devices=devices, global_batch_size=batch)
    limit = asked.memory_limit * GIB
    lean_enough = (setup for setup in setups(asked) if least_bytes(setup) <= limit)
    fitting = [each for setup in lean_enough for each in scheduled(asked, setup) if accept(each)]
    bounded = sorted(((least_seconds(each.setup, asked.machine), each) for each in fitting), key=lambda pair: pair[0])
    needed = tokens * law.overhead(batch * question.sequence_length / largest)
    best: Training | None = None
    for bound, each in bounded:
        if best is not None and bound >= best.step_seconds:
            break
        if _is_long(each):
            continue
        step = predict_long(each.setup, asked.machine)
        if step.memory <= limit and (best is None or step.seconds < best.step_seconds):
            steps = needed / (batch * question.sequence_length)
            best = Training(each, step.seconds, step.memory / GIB, steps, needed)
    return best


def _divisible(sequences: float) -> int:
    """A number of sequences up to this one, at least 1: a power of two times an odd number up to 7."""
    most = max(1, int(sequences))
    power = 1 << max(0, most.bit_length() - 3)
    return most // power * power


def _is_long(candidate: Candidate) -> bool:
    setup = candidate.setup
    units = min(setup.num_microbatches * len(setup.segments), 4 * setup.pipeline_parallel + len(setup.segments))
    return 2 * units * setup.placement.num_stages > _MOST_ACTIONS
