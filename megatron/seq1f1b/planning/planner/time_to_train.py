"""How soon a model can be trained on a number of tokens (arXiv 2106.02679, section 3).

A law of the critical batch size bounds the batch: beyond it, more of a batch trains no faster. More devices share it
among them until pipelines starve. All laws are in tokens here; docs/planning.md has their formulas and how they differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from types import MappingProxyType
from typing import NamedTuple

from ..costs.blocks import parameters_of_model
from .search import Search
from .space import Candidate, Question


class BatchLaw(NamedTuple):
    """`largest(parameters, tokens)` is the largest batch worth its tokens, in tokens; `overhead(x)` is how many more
    tokens, relative to `tokens`, a batch of x times that size needs to reach the same loss."""

    source: str
    largest: Callable[[float, float], float]
    overhead: Callable[[float], float]


def loss(parameters: float, tokens: float) -> float:
    """Nats a token (arXiv 2001.08361, equation 1.5 with table 2)."""
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def _olmo(parameters: float, tokens: float) -> float:
    """1024 documents, 2048 from 168e9 tokens on and 4096 from 503e9 on, averaged over the run."""
    return 4096 * 1024 * (tokens + max(0.0, tokens - 168e9) + 2 * max(0.0, tokens - 503e9)) / tokens


LAWS: Mapping[str, BatchLaw] = MappingProxyType(
    {
        "tokens": BatchLaw("arXiv 2410.21676", lambda n, d: 512 * 22.91 * (d / 1e6) ** 0.47, lambda x: 1 + 0.2 * x),
        "noise-scale": BatchLaw("arXiv 1812.06162", lambda n, d: 2e8 / loss(n, d) ** (1 / 0.21), lambda x: 1 + x),
        "olmo": BatchLaw("arXiv 2505.23971", _olmo, lambda x: 1.0),
        # Twice the best batch, which takes 5 % more tokens, as does a half of the best.
        "three-term": BatchLaw(
            "arXiv 2607.01487", lambda n, d: 2 * 0.667 * d**0.566, lambda x: 1 + 0.05 * log2(2 * x) ** 2
        ),
    }
)


@dataclass(frozen=True)
class Training:
    """A configuration, and how long it trains."""

    candidate: Candidate
    step_seconds: float
    memory_gib: float
    steps: float

    @property
    def days(self) -> float:
        return self.steps * self.step_seconds / 86400

    @property
    def device_hours(self) -> float:
        return 24 * self.days * self.candidate.setup.num_devices


def soonest(
    question: Question, tokens: float, law: BatchLaw, shares: Sequence[float] = (1.0, 0.5, 0.25)
) -> Training | None:
    """The configuration that trains soonest; None where nothing fits.

    The batch of the question does not matter: it is one of `shares` of the largest by the law (a smaller one needs
    fewer tokens), in sequences of `question.sequence_length`: a power of two times an odd number up to 7.
    """
    largest = law.largest(parameters_of_model(question.model), tokens)
    best: Training | None = None
    for share in shares:
        most = max(1, int(share * largest / question.sequence_length))
        power = 1 << max(0, most.bit_length() - 3)
        batch = most // power * power
        in_batch = batch * question.sequence_length
        steps = tokens * law.overhead(in_batch / largest) / in_batch
        below = inf if best is None else best.steps * best.step_seconds / steps
        for found in Search(replace(question, global_batch_size=batch)).best(1, below):
            best = Training(found.candidate, found.prediction.seconds, found.memory_gib, steps)
    return best
