"""Placements and the text of actions; and the largest schedule that we promise, of two million actions: 64 ranks, 512
micro-batches, 16 segments, 2 chunks."""

import subprocess
import sys

import pytest

from megatron.seq1f1b.schedule import CHUNK_KINDS, Action, Kind, Placement, parse_action
from support.patience import patient


def test_looped_and_v():
    looped, v = Placement(2, 4), Placement(2, 4, "v")
    assert [looped.rank_of(stage) for stage in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [looped.stages_of(rank) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [v.rank_of(stage) for stage in range(8)] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [v.stages_of(rank) for rank in range(2)] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert [v.chunk_of(stage) for stage in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Placement(4, 2).neighbours_of(0) == [1, 3]
    assert Placement(4, 2, "v").neighbours_of(0) == [1]
    assert Placement(2, 2).neighbours_of(0) == [1]
    assert Placement(1, 4).neighbours_of(0) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 1), "at least one rank and one model chunk, not 0 and 1"),
        ((1, 0), "at least one rank and one model chunk, not 1 and 0"),
        ((2, 2, "zigzag"), "unknown placement 'zigzag'"),
    ],
)
def test_bad_placements_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Placement(*arguments)


def test_text_form_and_parser_are_inverses():
    for kind in Kind:
        action = Action(kind, 127) if kind in CHUNK_KINDS else Action(kind, 127, 511, 15)
        assert parse_action(str(action)) == action
        assert isinstance(parse_action(str(action)).kind, Kind)
    assert str(Action(Kind.F, 2, 3, 1)) == "2F3.1"
    assert str(Action(Kind.RECV_B, 2, 3, 1)) == "2RECV_B3.1"
    assert str(Action(Kind.REDUCE, 2)) == "2REDUCE"
    assert parse_action("2F3") == Action(Kind.F, 2, 3, 0)


@pytest.mark.parametrize("text", ["", "F3.1", "2X3.1", "2F", "2REDUCE3.1", "2F3.", "2F3.1x", "-1F0.0"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        parse_action(text)


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


@pytest.mark.parametrize("microbatches, mebibytes", [(16, 128), pytest.param(512, 2048, marks=pytest.mark.exhaustive)])
def test_two_million_actions_take_little_memory(microbatches, mebibytes):
    """Also a few of them. Eight seconds of an idle core; the time limit only ends a run that will not."""
    command = [sys.executable, "-c", WHOLE, str(microbatches)]
    kibibytes = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(120)).stdout)
    assert kibibytes <= mebibytes * 1024
