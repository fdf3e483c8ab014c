"""What every framework promises of its steps: by segments they are those of whole sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Training:
    """Of one rank; losses are on the last stage alone."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)  # losses of evaluations, where a framework has them
    peak_bytes: int = 0  # of tensors that live at once in the last step


def require_equal_steps(trainings: Sequence[Mapping[str, Any]], case: str, number: int, of_zero: float = 0.0) -> None:
    """Compare a case of `trainings`, by rank and case: with segments and without, `number` steps each. Losses whose
    terms cancel may differ by `of_zero`."""
    ours, own = with_losses(trainings, case)
    assert len(own.losses) == len(own.norms) == number
    assert ours.losses == pytest.approx(own.losses, rel=1e-5, abs=of_zero)
    assert ours.norms == pytest.approx(own.norms, rel=1e-5)


def with_losses(trainings: Sequence[Mapping[str, Any]], case: str) -> tuple[Any, Any]:
    """A case on the one rank that has its losses."""
    [found] = [of_rank[case] for of_rank in trainings if of_rank[case][1].losses]
    return found
