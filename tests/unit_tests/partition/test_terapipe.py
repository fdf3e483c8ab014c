"""TeraPipe's dynamic programmes: optimal, and fast."""

import sys
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.partition import Task, segment_times, terapipe
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, CPU_CORE, analytic_costs, bottleneck_time

MODULE = sys.modules["megatron.seq1f1b.partition.terapipe"]
GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)


def pace(layers=(8,) * 4, device=A100):
    return bottleneck_time(analytic_costs(GPT_7B, layers, device))


def splits(length, num_segments):
    for cuts in combinations(range(1, length), num_segments - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, length), strict=True))


def latency(task, lengths):
    times = segment_times(lengths, task.time)
    return task.num_microbatches * sum(times) + (task.num_stages - 1) * max(times)


# Any times at all, also ones that fall as a segment grows.
any_times = st.lists(st.integers(1, 30), min_size=36, max_size=36).map(
    lambda values: lambda start, end: float(values[end * (end - 1) // 2 + start])
)
analytic_times = st.builds(
    lambda fixed, token, pair: lambda start, end: fixed + token * (end - start) + pair * (end - start) * (start + end),
    st.floats(0.01, 10),
    st.floats(0.01, 10),
    st.floats(0, 10),
)


@given(
    time=any_times | analytic_times,
    length=st.integers(1, 8),
    num_stages=st.integers(1, 12),
    num_microbatches=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_optimal_as_found_by_brute_force(time, length, num_stages, num_microbatches):
    task = Task(length, None, time=time, num_stages=num_stages, num_microbatches=num_microbatches)
    best_of_all = float("inf")
    for num_segments in range(1, length + 1):
        best = min(map(partial(latency, task), splits(length, num_segments)))
        found = terapipe(replace(task, num_segments=num_segments))
        assert len(found) == num_segments and sum(found) == length
        assert latency(task, found) == pytest.approx(best, rel=1e-5)
        best_of_all = min(best_of_all, best)
    found = terapipe(task)
    assert sum(found) == length
    assert latency(task, found) == pytest.approx(best_of_all, rel=1e-5)


@pytest.mark.parametrize("layers", [(32,), (24, 8), (8,) * 4], ids=["1 stage", "2 stages", "4 stages"])
@pytest.mark.parametrize("num_segments", [2, 5, 8])
@pytest.mark.parametrize("fixed", [0.0, 1e-4], ids=["nothing fixed", "fixed"])
def test_few_bounds_are_tried_however_few_the_stages(layers, num_segments, fixed, monkeypatch):
    """With one stage only the sum counts, and the search has no longest time to go by."""
    tried = []

    def counting(times, num_segments):
        solve = shortest_path(times, num_segments)
        return lambda tmax: tried.append(tmax) or solve(tmax)

    shortest_path = MODULE._shortest_path
    monkeypatch.setattr(MODULE, "_shortest_path", counting)
    time = pace(layers, replace(A100, kernel_latency=fixed / 20))
    lengths = terapipe(Task(8192, num_segments, 64, time, num_stages=len(layers)))
    assert len(lengths) == num_segments and sum(lengths) == 8192
    assert len(tried) <= 40


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_of_equal_sums_the_balanced_one_is_returned(num_microbatches):
    """On one stage, times without a jump add up to the same wherever the cuts are."""
    time = pace((32,))
    times = segment_times(terapipe(Task(16384, 4, time=time, num_microbatches=num_microbatches)), time)
    assert max(times) < 1.02 * sum(times) / 4


def test_more_stages_or_fewer_microbatches_need_more_segments():
    task = Task(16384, None, 128, pace())
    counts = [len(terapipe(replace(task, num_stages=num_stages))) for num_stages in (2, 8, 64)]
    assert counts == sorted(set(counts))
    assert len(terapipe(replace(task, num_stages=8, num_microbatches=32))) < counts[1]


@pytest.mark.parametrize("num_segments, step", [(None, 32), (4, 64)])
@pytest.mark.parametrize("device", [A100, CPU_CORE], ids=["a100", "cpu"])
def test_multiples_and_what_is_left_over(num_segments, step, device):
    lengths = terapipe(Task(16384 + 24, num_segments, 8, pace(device=device), num_stages=4))
    assert sum(lengths) == 16408 and lengths[0] % 8 == 0
    assert all(length % step == 0 for length in lengths[1:]), "the first segment takes what is left over"


def test_many_segments_have_enough_positions(monkeypatch):
    monkeypatch.setattr(MODULE, "_MOST_POSITIONS", 16)
    for num_segments in (8, 9, 10):
        assert len(terapipe(Task(18, num_segments, time=lambda start, end: 1.0 + end - start))) == num_segments
