"""The largest schedule that we promise: 64 ranks, 512 micro-batches, 16 segments, 2 chunks."""

import subprocess
import sys

import pytest

from megatron.seq1f1b.schedule import Placement, Shape, program
from megatron.seq1f1b.schedule.clock import Clock
from support.patience import patient

WHOLE = """
import resource
from megatron.seq1f1b.schedule import Placement, Shape, build, simulate, validate
schedule = build("1f1b", Shape(Placement(64, 2), 512, 16))
validate(schedule)
simulate(schedule)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_two_million_actions_are_built_validated_and_timed_in_little_memory():
    """Eight seconds of an idle core; the limit here only ends a run that will not."""
    command = [sys.executable, "-c", WHOLE]
    kibibytes = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(120)).stdout)
    assert kibibytes <= 2 * 1024**2


@pytest.mark.parametrize("one_queue", [False, True])
def test_one_rank_is_built_without_the_others(one_queue, monkeypatch):
    built = []
    order = Clock.order
    monkeypatch.setattr(Clock, "order", lambda clock, rank: built.append(rank) or order(clock, rank))
    actions = program("1f1b", Shape(Placement(64, 2), 512, 16), 31, one_queue=one_queue)
    assert sorted(built) == [30, 31, 32]
    assert len(actions) == 2 * 2 * 512 * 16 * 3 + 4  # compute, a receive and a send for each; 2 GATHER, 2 REDUCE
