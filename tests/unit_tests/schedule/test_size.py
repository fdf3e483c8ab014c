"""The largest schedule that we promise, of two million actions: 64 ranks, 512 micro-batches, 16 segments, 2 chunks."""

import subprocess
import sys

import pytest

from support.patience import patient

WHOLE = """
import re, sys
from megatron.seq1f1b.schedule import Placement, Shape, build, lower_rank, simulate, validate
microbatches = int(sys.argv[1])
schedule = build("1f1b", Shape(Placement(64, 2), microbatches, 16))
validate(schedule)
simulate(schedule)
# compute, a receive and a send for each; 2 GATHER, 2 REDUCE
assert len(lower_rank(schedule, 31, one_queue=True)) == 2 * 2 * microbatches * 16 * 3 + 4
# ru_maxrss would begin with the memory of the process that started this one
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize("microbatches, mebibytes", [(64, 256), pytest.param(512, 2048, marks=pytest.mark.exhaustive)])
def test_two_million_actions_take_little_memory(microbatches, mebibytes):
    """Also an eighth of them. Eight seconds of an idle core; the time limit only ends a run that will not."""
    command = [sys.executable, "-c", WHOLE, str(microbatches)]
    kibibytes = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(120)).stdout)
    assert kibibytes <= mebibytes * 1024
