"""Segment lengths: the authors' golden values, what holds for every cut, equal costs, and TeraPipe's optimum."""

import csv
import random
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from megatron.seq1f1b.costs.blocks import paper_flops
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.stage_costs import A100, CPU_CORE, AnalyticTime, analytic_costs, bottleneck_time
from megatron.seq1f1b.partition import (
    STRATEGIES,
    Task,
    balanced,
    check_lengths,
    cut_sequence,
    even,
    segment_times,
    terapipe,
    uniform_comp,
    within_documents,
)
from megatron.seq1f1b.partition.balanced import shortest_step
from megatron.seq1f1b.partition.summed_time import SlowestTime

GPT_2_7B = ModelShape(32, 2560, 10240, 32, 80, 32768)
GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)
LLAMA_8B = ModelShape(32, 4096, 14336, 32, 128, 128256, num_kv_heads=8, is_gated=True)
TABLE = list(csv.DictReader((Path(__file__).parent.parent / "data" / "seq1f1b_cwp_splits.csv").open()))
MODULE = sys.modules["megatron.seq1f1b.partition.terapipe"]


def pace(model=GPT_7B, layers=(8,) * 4, device=A100):
    """The time of a segment on the slowest stage."""
    return bottleneck_time(analytic_costs(model, layers, device))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['seqlen']}-k{row['k']}")
def test_uniform_comp_gives_the_authors_lengths(row):
    model = {"2.7B": GPT_2_7B, "7B": GPT_7B}[row["model"]]
    lengths = uniform_comp(int(row["seqlen"]), int(row["k"]), *paper_flops(model), int(row["tp"]))
    assert lengths == tuple(int(length) for length in row["splits"].split(";"))


def test_uniform_comp_refuses_an_empty_segment():
    with pytest.raises(ValueError, match="--sequence-splits 8 .* empty segment"):
        uniform_comp(16, 8, *paper_flops(GPT_7B), multiple_of=8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "length, num_segments, problem",
    [(1001, 4, "--seq-length 1001 is not a multiple of 8")]
    + [(8 * pieces, 32, f"use at most {pieces} segments") for pieces in (1, 31)],
)
def test_a_sequence_that_does_not_fit_is_refused(strategy, length, num_segments, problem):
    with pytest.raises(ValueError, match=problem):
        cut_sequence(strategy, Task(length, num_segments, 8, time=pace(), flops=paper_flops(GPT_7B)))


@pytest.mark.parametrize(
    "lengths, problem",
    [
        ((4096, 4095), "add up to 8191, not to --seq-length 8192"),
        ((2048, 6144), "2 segments, not --sequence-splits 3"),
        ((1, 4096, 4095), "a segment of 1 tokens; sequence parallelism needs a multiple of 8"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths, problem):
    with pytest.raises(ValueError, match=problem):
        check_lengths(lengths, 8192, 3, 8)


def imbalance(lengths, cost):
    costs = segment_times(lengths, cost)
    return max(costs) * len(costs) / sum(costs)


@given(
    pieces=st.integers(1, 16384),
    num_segments=st.integers(1, 32),
    multiple_of=st.sampled_from([1, 2, 3, 8, 12]),
    model=st.sampled_from([GPT_7B, LLAMA_8B]),
    device=st.sampled_from([A100, CPU_CORE]),
    min_length=st.sampled_from([1, 100, 768]),
    documents=st.sampled_from([None, [(0, 3), (0, 30)], [(0, 1, 500, 501)]]),
)
@example(pieces=768, num_segments=1, multiple_of=1, model=GPT_7B, device=CPU_CORE, min_length=1, documents=None)
@settings(max_examples=100, deadline=None)
def test_covers_the_sequence_in_multiples(pieces, num_segments, multiple_of, model, device, min_length, documents):
    assume(num_segments <= pieces)
    length = pieces * multiple_of
    if documents is not None:  # not all of them begin in a short sequence
        documents = [[start for start in starts if start < length] for starts in documents]
    equal = even(length, num_segments, multiple_of)
    assert max(equal) - min(equal) <= multiple_of
    found = [equal, balanced(length, num_segments, pace(model, device=device), multiple_of, min_length, documents)]
    if pieces >= 64 and num_segments <= 16:  # else a segment may be empty
        found.append(uniform_comp(length, num_segments, *paper_flops(GPT_7B), multiple_of))
    for lengths in found:
        assert len(lengths) == num_segments and sum(lengths) == length
        assert all(part > 0 and part % multiple_of == 0 for part in lengths)


@given(
    tokens=st.integers(2048, 262144),
    num_segments=st.sampled_from([2, 3, 4, 8, 16]),
    model=st.sampled_from([GPT_7B, LLAMA_8B]),
    num_stages=st.sampled_from([1, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_costs_are_equal_up_to_rounding_and_the_least(tokens, num_segments, model, num_stages):
    cost = pace(model, (model.num_layers // num_stages,) * num_stages)
    ours = imbalance(balanced(tokens, num_segments, cost), cost)
    # A boundary moves by half a tile, so a segment by a tile of at most a 64th of the mean length; where the prefix is
    # long a tile weighs up to twice that of a mean one.
    assert ours < 1.04
    assert ours < imbalance(even(tokens, num_segments), cost) + 1e-9
    assert ours < imbalance(uniform_comp(tokens, num_segments, *paper_flops(model)), cost) + 0.04


def least_longest_time(length, num_segments, multiple, time):
    """By a table over all positions: the least longest time of the first segments that end at each."""
    best = {0: 0.0}
    for _ in range(num_segments):
        following = {}
        for cut, most in best.items():
            for end in range(cut + multiple, length + 1, multiple):
                following[end] = min(following.get(end, inf), max(most, time(cut, end)))
        best = following
    return best[length]


@pytest.mark.parametrize("num_segments, multiple", [(32, 16), (8, 16), (5, 64), (3, 8), (1, 16)])
@pytest.mark.parametrize("length", [512, 1024])
def test_the_longest_time_is_the_least_that_the_multiples_allow(length, num_segments, multiple):
    time = pace()
    found = max(segment_times(balanced(length, num_segments, time, multiple), time))
    assert found == pytest.approx(least_longest_time(length, num_segments, multiple, time))


def seconds_of_parts():
    return st.sampled_from([0.0, 1e-6, 3e-5, 0.01])


@given(
    pieces=st.integers(1, 20000),
    num_segments=st.integers(1, 40),
    multiple_of=st.sampled_from([1, 3, 8, 512]),
    min_length=st.sampled_from([1, 768]),
    parts=st.lists(
        st.tuples(seconds_of_parts(), seconds_of_parts(), seconds_of_parts(), seconds_of_parts()), min_size=1
    ),
    window=st.sampled_from([128, 4096]),
    are_weighted=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_sums_cut_as_calls_do(pieces, num_segments, multiple_of, min_length, parts, window, are_weighted):
    """Times that add up over tokens are not called for each cut; the cuts are those of the same times as a function."""
    assume(num_segments <= pieces)
    slowest = SlowestTime(tuple(AnalyticTime(*each, window) for each in parts))
    weights = [1 + number % 3 for number in range(num_segments)] if are_weighted else None
    found = [
        balanced(pieces * multiple_of, num_segments, time, multiple_of, min_length, weights=weights)
        for time in (slowest, lambda start, end: slowest(start, end))
    ]
    assert found[0] == found[1]


def test_no_segment_is_shorter_than_the_minimum():
    cost = pace(device=CPU_CORE)
    assert min(balanced(4096, 5, cost)) < 768
    assert min(balanced(4096, 5, cost, min_length=768)) >= 768
    assert len(balanced(4096, 6, cost, min_length=768)) == 6, "an impossible minimum is given up"


def test_a_cpu_takes_the_better_of_long_and_equal_segments():
    small = ModelShape(4, 256, 1024, 4, 64, 512)
    time = pace(small, (1,) * 4, CPU_CORE)
    for tokens, num_segments in ((3840, 5), (8192, 4), (19454, 16), (14996, 16), (4933, 5)):
        lengths = cut_sequence("balanced", Task(tokens, num_segments, time=time, full_speed_rows=768))
        alternatives = [even(tokens, num_segments), uniform_comp(tokens, num_segments, *paper_flops(small))]
        best = min(max(segment_times(option, time)) for option in alternatives)
        assert max(segment_times(lengths, time)) < 1.02 * best


DOCUMENTS = ((0, 5, 6, 40, 96 - 1), (0,), (0, 48))


@pytest.mark.parametrize("first, last", [(0, 96), (0, 1), (3, 40), (5, 6), (39, 41), (60, 96), (95, 96)])
def test_cost_counts_the_pairs_within_documents(first, last):
    """A query sees itself and the tokens before it in its document."""
    time = AnalyticTime(fixed=7.0, per_token=3.0, per_pair=0.5)
    pairs = [
        query - max(start for start in starts if start <= query) + 1
        for starts in DOCUMENTS
        for query in range(first, last)
    ]
    expected = 7 + 3 * (last - first) + 0.5 * sum(pairs) / len(DOCUMENTS)
    assert within_documents(time, DOCUMENTS, range(97))(first, last) == pytest.approx(expected)


def packed(sequence_length, mean, count, seed=1):
    generator = random.Random(seed)
    sequences = []
    for _ in range(count):
        starts = [0]
        while (start := starts[-1] + 1 + int(generator.expovariate(1 / mean))) < sequence_length:
            starts.append(start)
        sequences.append(tuple(starts))
    return sequences


@pytest.mark.parametrize("mean", [300, 20000, 100000])
@pytest.mark.parametrize("count", [1, 3])
def test_segments_of_a_micro_batch_cost_the_same(mean, count):
    documents, cost, looks = packed(131073, mean, count), pace(), []
    lengths = balanced(131073, 16, lambda *span: looks.append(span) or cost(*span), documents=documents)
    assert len(looks) < 20000
    assert sum(lengths) == 131073 and all(length % 128 == 0 for length in lengths[1:]), "the kernels' tile"
    costs = segment_times(lengths, within_documents(cost, documents, range(131074)))
    assert max(costs) < 1.05 * min(costs)


def in_proportion(length, weights):
    return balanced(length, len(weights), lambda start, end: end - start, weights=weights)


@given(count=st.integers(2, 12), trials=st.integers(0, 30), best=st.data())
@settings(max_examples=50, deadline=None)
def test_no_step_that_was_seen_is_shorter(count, trials, best):
    wanted = best.draw(st.lists(st.integers(1, 4000), min_size=count, max_size=count))
    seen = []

    def seconds(lengths):
        assert sum(lengths) == 65536 and min(lengths) > 0 and len(lengths) == count
        seen.append(sum((a - b) ** 2 for a, b in zip(lengths, wanted, strict=True)))
        return seen[-1]

    start = in_proportion(65536, [1] * count)
    found = shortest_step(start, partial(in_proportion, 65536), seconds, trials)
    assert len(seen) <= 1 + trials
    assert seconds(found) == min(seen) and (trials or found == start)


def test_times_are_in_proportion_and_a_long_middle_is_found():
    assert in_proportion(6400, [1, 2, 5]) == (800, 1600, 4000)

    def seconds(lengths):
        return abs(sum(lengths[2:6]) / sum(lengths) - 0.7)

    found = shortest_step((8192,) * 8, partial(in_proportion, 65536), seconds, trials=30)
    assert seconds(found) < 0.05 < seconds((8192,) * 8)


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
    best_of_all = inf
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
    time = pace(GPT_7B, layers, structs.replace(A100, kernel_latency=fixed / 20))
    lengths = terapipe(Task(8192, num_segments, 64, time, num_stages=len(layers)))
    assert len(lengths) == num_segments and sum(lengths) == 8192
    assert len(tried) <= 40


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_of_equal_sums_the_balanced_one_is_returned(num_microbatches):
    """On one stage, times without a jump add up to the same wherever the cuts are."""
    time = pace(layers=(32,))
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


def test_terapipe_refuses_more_segments_than_it_can_find_in_time():
    task = Task(sequence_length=65536, num_segments=257, time=lambda start, end: float(end - start))
    with pytest.raises(ValueError, match="^--sequence-split-strategy terapipe cuts into 256 segments at most, since"):
        terapipe(task)
