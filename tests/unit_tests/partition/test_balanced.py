"""The balanced partition: equal costs, up to rounding, of packed sequences, too; cuts tried by the step they make."""

import itertools
import random
from functools import partial

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.partition import (
    Task,
    balanced,
    cut_sequence,
    even,
    segment_times,
    uniform_comp,
    within_documents,
)
from megatron.seq1f1b.partition.balanced import shortest_step
from megatron.seq1f1b.planning.costs.blocks import authors_flops
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, CPU_CORE, AnalyticTime, analytic_costs, bottleneck_time

GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)
LLAMA_8B = ModelShape(32, 4096, 14336, 32, 128, 128256, num_kv_heads=8, is_gated=True)


def pace(model, num_stages=4, device=A100):
    return bottleneck_time(analytic_costs(model, (model.num_layers // num_stages,) * num_stages, device))


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
    lengths = balanced(length, num_segments, pace(model, device=device), multiple_of, min_length, documents)
    assert len(lengths) == num_segments and sum(lengths) == length
    assert all(part > 0 and part % multiple_of == 0 for part in lengths)


@pytest.mark.parametrize("cut", [balanced, even, partial(balanced, documents=[(0,)])])
def test_more_segments_than_pieces_are_refused(cut):
    options = {} if cut is even else {"time": pace(GPT_7B)}
    for pieces, num_segments, multiple_of in itertools.product((1, 2, 31), (32, 40), (1, 8)):
        with pytest.raises(ValueError, match=f"use at most {pieces} segments"):
            cut(pieces * multiple_of, num_segments, multiple_of=multiple_of, **options)


@given(
    tokens=st.integers(2048, 262144),
    num_segments=st.sampled_from([2, 3, 4, 8, 16]),
    model=st.sampled_from([GPT_7B, LLAMA_8B]),
    num_stages=st.sampled_from([1, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_costs_are_equal_up_to_rounding_and_the_least(tokens, num_segments, model, num_stages):
    cost = pace(model, num_stages)
    ours = imbalance(balanced(tokens, num_segments, cost), cost)
    # A boundary moves by half a tile, so a segment by a tile of at most a 64th of the mean length; where the prefix is
    # long a tile weighs up to twice that of a mean one.
    assert ours < 1.04
    assert ours < imbalance(even(tokens, num_segments), cost) + 1e-9
    assert ours < imbalance(uniform_comp(tokens, num_segments, *authors_flops(model)), cost) + 0.04


def least_longest_time(length, num_segments, multiple, time):
    """By a table over all positions: the least longest time of the first segments that end at each."""
    best = {0: 0.0}
    for _ in range(num_segments):
        times = [
            (end, max(most, time(cut, end)))
            for cut, most in best.items()
            for end in range(cut + multiple, length + 1, multiple)
        ]
        best = {}
        for end, most in times:
            best[end] = min(most, best.get(end, most))
    return best[length]


@pytest.mark.parametrize("num_segments, multiple", [(32, 16), (8, 16), (5, 64), (3, 8), (1, 16)])
@pytest.mark.parametrize("length", [512, 1024])
def test_the_longest_time_is_the_least_that_the_multiples_allow(length, num_segments, multiple):
    time = pace(GPT_7B, num_stages=4)
    if length < num_segments * multiple:
        return
    found = max(segment_times(balanced(length, num_segments, time, multiple), time))
    assert found == pytest.approx(least_longest_time(length, num_segments, multiple, time))


def test_long_segments_are_multiples_of_the_kernel_tile():
    assert all(length % 128 == 0 for length in balanced(65536, 8, pace(GPT_7B)))
    assert sum(length % 128 != 0 for length in balanced(65537, 8, pace(GPT_7B))) == 1


def test_no_segment_is_shorter_than_the_minimum():
    cost = pace(GPT_7B, device=CPU_CORE)
    assert min(balanced(4096, 5, cost)) < 768
    assert min(balanced(4096, 5, cost, min_length=768)) >= 768
    assert len(balanced(4096, 6, cost, min_length=768)) == 6, "an impossible minimum is given up"


def test_a_cpu_takes_the_better_of_long_and_equal_segments():
    small = ModelShape(4, 256, 1024, 4, 64, 512)
    costs = analytic_costs(small, (1,) * 4, CPU_CORE)
    for tokens, num_segments in ((3840, 5), (8192, 4), (19454, 16), (14996, 16), (4933, 5)):
        lengths = cut_sequence("balanced", Task(tokens, num_segments, time=bottleneck_time(costs), full_speed_rows=768))
        alternatives = [even(tokens, num_segments), uniform_comp(tokens, num_segments, *authors_flops(small))]
        best = min(max(segment_times(option, bottleneck_time(costs))) for option in alternatives)
        assert max(segment_times(lengths, bottleneck_time(costs))) < 1.02 * best


COST = pace(GPT_7B)
EVERY_TOKEN = range(97)
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
    assert within_documents(time, DOCUMENTS, EVERY_TOKEN)(first, last) == pytest.approx(expected)


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
    documents = packed(131072, mean, count)
    lengths = balanced(131072, 16, COST, documents=documents)
    assert sum(lengths) == 131072 and all(length % 128 == 0 for length in lengths)
    costs = segment_times(lengths, within_documents(COST, documents, range(131073)))
    assert max(costs) < 1.05 * min(costs)


def test_a_long_sequence_is_cut_with_few_looks_at_the_cost():
    looks = []
    documents = packed(131072, 500, 1)
    balanced(131072, 16, lambda start, end: looks.append(start) or COST(start, end), documents=documents)
    assert len(looks) < 20000


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


def test_a_long_middle_is_found():
    def seconds(lengths):
        return abs(sum(lengths[2:6]) / sum(lengths) - 0.7)

    found = shortest_step((8192,) * 8, partial(in_proportion, 65536), seconds, trials=30)
    assert seconds(found) < 0.05 < seconds((8192,) * 8)


def test_times_are_in_proportion_to_weights():
    assert in_proportion(6400, [1, 2, 5]) == (800, 1600, 4000)
