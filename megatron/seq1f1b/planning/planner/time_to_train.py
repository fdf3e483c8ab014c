"""How soon a model can be trained on a number of tokens, and what more devices change (arXiv 2106.02679, section 3).

The batch is bounded by a law of the critical batch size: how large it may be before more of it trains no faster. More
devices share it among them until pipelines starve: then a larger batch, or another way to run the pipeline, is what
would help. Two of the papers count in sequences of their own length; all is in tokens here. The constants of
arXiv 2410.21676 agree with the steps to a loss that its authors published
(github.com/hlzhang109/critical-batch-size, plots/chinchilla.ipynb); those of the others are as quoted by readers of the
papers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from types import MappingProxyType

from ...errors import ParameterError
from ..costs.machine import GIB
from ..costs.model_shape import parameters_of_model
from ..simulator import predict_long
from .search import least_bytes, least_seconds
from .space import Candidate, Question, scheduled, setups


@dataclass(frozen=True)
class BatchLaw:
    """`largest(parameters, tokens)` is the largest batch worth its tokens, in tokens; `overhead(x)` is how many more
    tokens, relative to `tokens`, a batch of x times that size needs to reach the same loss."""

    source: str
    largest: Callable[[float, float], float]
    overhead: Callable[[float], float]

    def bounded_by(self, batch: float) -> "BatchLaw":
        """The same law with a measured largest batch, in tokens."""
        return replace(self, source=f"as given; tokens by {self.source}", largest=lambda parameters, tokens: batch)


def loss(parameters: float, tokens: float) -> float:
    """Nats a token (arXiv 2001.08361, equation 1.5 with table 2)."""
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def _by_noise(parameters: float, tokens: float) -> float:
    return float(2e8 / loss(parameters, tokens) ** (1 / 0.21))


def _by_tokens(parameters: float, tokens: float) -> float:
    return float(512 * 22.91 * (tokens / 1e6) ** 0.47)


def _by_olmo(parameters: float, tokens: float) -> float:
    documents = 0.0
    for start, size in ((0.0, 1024), (168e9, 1024), (503e9, 2048)):  # what is added from there on
        documents += size * max(0.0, tokens - start) / tokens
    return 4096 * documents


def _by_three_terms(parameters: float, tokens: float) -> float:
    return float(2 * 0.667 * tokens**0.566)


LAWS: Mapping[str, BatchLaw] = MappingProxyType(
    {
        "noise-scale": BatchLaw(
            "arXiv 1812.06162: B_crit by the loss, 2e8 tokens / L^(1/0.21) as arXiv 2001.08361 fits it (equation 1.4); "
            "at B_crit twice the tokens",
            _by_noise,
            lambda share: 1 + share,
        ),
        "tokens": BatchLaw(
            "arXiv 2410.21676: 22.91 (D / 1e6)^0.47 sequences of 512 tokens, whatever the size of the model; there "
            "20 % more tokens, in between by the form of arXiv 1812.06162",
            _by_tokens,
            lambda share: 1 + 0.2 * share,
        ),
        "olmo": BatchLaw(
            "arXiv 2505.23971: 1024 documents of 4096 tokens, 2048 from 168e9 tokens on, 4096 from 503e9 on, averaged "
            "over the run (its appendix D); no more tokens up to there",
            _by_olmo,
            lambda share: 1.0,
        ),
        "three-term": BatchLaw(
            "arXiv 2607.01487: best at 0.667 D^0.566 tokens; 5 % more tokens at half and at twice that, which is the "
            "most taken here",
            _by_three_terms,
            lambda share: 1 + 0.05 * log2(2 * share) ** 2,
        ),
    }
)


def batch_law(name: str) -> BatchLaw:
    """The law of this name; raises ValueError if it is not among LAWS."""
    if name not in LAWS:
        raise ParameterError("{critical_batch_law} is unknown; take {0}", ", ".join(LAWS), critical_batch_law=name)
    return LAWS[name]


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
