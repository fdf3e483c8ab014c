"""What every framework promises of its steps: by segments they are those of whole sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def require_equal_steps(trainings: Sequence[Mapping[str, Any]], case: str, number: int) -> None:
    """Compare a case of `trainings`, by rank and case: with segments and without, `number` steps each."""
    ours, own = with_losses(trainings, case)
    assert len(own.losses) == len(own.norms) == number
    assert ours.losses == pytest.approx(own.losses, rel=1e-5)
    assert ours.norms == pytest.approx(own.norms, rel=1e-5)


def with_losses(trainings: Sequence[Mapping[str, Any]], case: str) -> tuple[Any, Any]:
    """A case on the one rank that has its losses."""
    [found] = [of_rank[case] for of_rank in trainings if of_rank[case][1].losses]
    return found
