"""What every framework promises of its steps: by segments they are those of whole sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def require_equal_steps(trainings: Sequence[Mapping[str, Any]], case: str, number: int) -> None:
    """Compare a case of `trainings`, by rank and case: with segments and without, `number` steps each. The last of the
    two stages alone has losses."""
    ours, own = trainings[1][case]
    assert len(own.losses) == len(own.norms) == number
    assert ours.losses == pytest.approx(own.losses, rel=1e-5)
    assert ours.norms == pytest.approx(own.norms, rel=1e-5)
