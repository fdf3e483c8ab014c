"""What PyTorch's allocator holds back is what its counters show."""

import pytest

from megatron.seq1f1b.planning.costs import step_memory as memory
from paper import allocator


def test_the_constants_are_the_measured_shares():
    constants = memory._HELD_BACK, memory._FOR_EACH_DOUBLING, memory._OF_LOGITS
    assert allocator.fit(allocator.measured()) == pytest.approx(constants, abs=0.005)


def test_runs_are_as_well_described_without_themselves():
    rows = allocator.measured()
    for log in {row.log for row in rows}:
        constants = allocator.fit([row for row in rows if row.log != log])
        assert max(abs(allocator.error(row, constants)) for row in rows if row.log == log) < 0.15
