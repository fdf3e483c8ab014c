"""Processes advance iterators, and share a search without a trace in its answer."""

import multiprocessing
import os
import signal
from contextlib import closing
from itertools import count, islice
from math import inf

import pytest

from megatron.seq1f1b.planner import search
from megatron.seq1f1b.planner.forked import merged
from megatron.seq1f1b.planner.search import Search
from unit_tests.planner.question import small


def killed_after(values):
    """Values, and then the end of the process that iterates over them."""
    yield from values
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_values_of_processes_come_in_order(num_processes):
    assert [*merged([[0, 3, 4], [], [1, 2, 5]], key=int, num_processes=num_processes)] == [0, 1, 2, 3, 4, 5]


def test_processes_end_with_who_reads_them():
    with closing(merged([count(), count()], key=int, num_processes=2)) as endless:
        assert [*islice(endless, 6)] == [0, 0, 1, 1, 2, 2]
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_a_killed_process_is_an_error():
    with pytest.raises(ValueError, match="memory is short; try fewer --workers"):
        list(merged([killed_after([1, 2]), count()], key=int, num_processes=2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("exact_below", [inf, 0.0], ids=["exact", "near"])
@pytest.mark.parametrize("by_megatron", [False, True], ids=["ours", "megatron"])
def test_processes_find_what_one_finds(monkeypatch, by_megatron, exact_below):
    question = small(memory_gib=2.5, host_gib=8)
    question = question.megatron_baseline() if by_megatron else question
    monkeypatch.setattr(search, "_ALONE", 10)
    alone = Search(question)
    found = alone.best(5, exact_below=exact_below)
    left = []
    shared = Search(question, progress=left.append, processes=3)
    assert shared.best(5, exact_below=exact_below) == found
    assert shared.least_seconds == alone.least_seconds
    assert shared.plans.keys() == alone.plans.keys()
    assert len(left) > 10
