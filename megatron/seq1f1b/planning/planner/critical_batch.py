"""How large a batch may be before more of it trains no faster: published laws of the critical batch size.

Two of the papers count in sequences of their own length; all is in tokens here. The constants of arXiv 2410.21676 agree
with the steps to a loss that its authors published (github.com/hlzhang109/critical-batch-size, plots/chinchilla.ipynb);
those of the others are as quoted by readers of the papers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log2
from types import MappingProxyType

from ...errors import ParameterError


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
