"""The largest schedule that we promise: 64 ranks, 512 micro-batches, 16 segments, 2 chunks."""

import subprocess
import sys

from support.patience import patient

WHOLE = """
import resource
from megatron.seq1f1b.schedule import Placement, Shape, build, lower_rank, simulate, validate
schedule = build("1f1b", Shape(Placement(64, 2), 512, 16))
validate(schedule)
simulate(schedule)
# compute, a receive and a send for each; 2 GATHER, 2 REDUCE
assert len(lower_rank(schedule, 31, one_queue=True)) == 2 * 2 * 512 * 16 * 3 + 4
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_two_million_actions_take_little_memory():
    """Eight seconds of an idle core; the limit here only ends a run that will not."""
    command = [sys.executable, "-c", WHOLE]
    kibibytes = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(120)).stdout)
    assert kibibytes <= 2 * 1024**2
