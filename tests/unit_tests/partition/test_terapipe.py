"""TeraPipe's dynamic programmes: optimal, and fast."""

import sys
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.partition import segment_times, terapipe
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, CPU_CORE, analytic_costs, bottleneck_time

GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)


def splits(length, num_segments):
    for cuts in combinations(range(1, length), num_segments - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, length), strict=True))


def latency(lengths, cost, num_stages, num_microbatches=1):
    times = segment_times(lengths, cost)
    return num_microbatches * sum(times) + (num_stages - 1) * max(times)


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
    cost=any_times | analytic_times,
    length=st.integers(1, 8),
    num_stages=st.integers(1, 12),
    num_microbatches=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_optimal_as_found_by_brute_force(cost, length, num_stages, num_microbatches):
    best_of_all = float("inf")
    for num_segments in range(1, length + 1):
        best = min(latency(lengths, cost, num_stages, num_microbatches) for lengths in splits(length, num_segments))
        found = terapipe(length, cost, num_stages, num_segments, num_microbatches=num_microbatches, step=1)
        assert len(found) == num_segments and sum(found) == length
        assert latency(found, cost, num_stages, num_microbatches) == pytest.approx(best, rel=1e-5)
        best_of_all = min(best_of_all, best)
    found = terapipe(length, cost, num_stages, num_microbatches=num_microbatches, step=1)
    assert sum(found) == length
    assert latency(found, cost, num_stages, num_microbatches) == pytest.approx(best_of_all, rel=1e-5)


@pytest.mark.parametrize("layers", [(32,), (24, 8), (8,) * 4], ids=["1 stage", "2 stages", "4 stages"])
@pytest.mark.parametrize("num_segments", [2, 5, 8])
@pytest.mark.parametrize("fixed", [0.0, 1e-4], ids=["nothing fixed", "fixed"])
def test_few_bounds_are_tried_however_few_the_stages(layers, num_segments, fixed, monkeypatch):
    """With one stage only the sum counts, and the search has no longest time to go by."""
    tried = []

    def counting(times, num_segments):
        solve = shortest_path(times, num_segments)
        return lambda tmax: tried.append(tmax) or solve(tmax)

    module = sys.modules["megatron.seq1f1b.partition.terapipe"]
    shortest_path = module._shortest_path
    monkeypatch.setattr(module, "_shortest_path", counting)
    cost = bottleneck_time(analytic_costs(GPT_7B, layers, replace(A100, kernel_latency=fixed / 20)))
    lengths = terapipe(8192, cost, len(layers), num_segments, step=64)
    assert len(lengths) == num_segments and sum(lengths) == 8192
    assert len(tried) <= 40


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_of_equal_sums_the_balanced_one_is_returned(num_microbatches):
    """On one stage, times without a jump add up to the same wherever the cuts are."""
    cost = bottleneck_time(analytic_costs(GPT_7B, (32,), A100))
    lengths = terapipe(16384, cost, 1, 4, num_microbatches=num_microbatches, step=64)
    times = segment_times(lengths, cost)
    assert max(times) < 1.02 * sum(times) / 4


def test_more_stages_or_fewer_microbatches_need_more_segments():
    cost = bottleneck_time(analytic_costs(GPT_7B, (8,) * 4, A100))
    counts = [len(terapipe(16384, cost, num_stages, step=128)) for num_stages in (2, 8, 64)]
    assert counts == sorted(set(counts))
    assert len(terapipe(16384, cost, 8, num_microbatches=32, step=128)) < counts[1]


@pytest.mark.parametrize("num_segments", [None, 4])
@pytest.mark.parametrize("device", [A100, CPU_CORE], ids=["a100", "cpu"])
def test_multiples_and_what_is_left_over(num_segments, device):
    cost = bottleneck_time(analytic_costs(GPT_7B, (8,) * 4, device))
    lengths = terapipe(16384 + 24, cost, 4, num_segments, multiple_of=8, step=64)
    assert sum(lengths) == 16408 and all(length % 8 == 0 for length in lengths)
    assert all(length % 64 == 0 for length in lengths[1:]), "the first segment takes what is left over"


def test_too_many_segments_for_the_step_are_refused():
    with pytest.raises(ValueError, match="9 are more segments than the 8 pieces of 128 tokens"):
        terapipe(1024, lambda start, end: 1.0, 2, 9, step=128)
