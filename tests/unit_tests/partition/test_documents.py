"""Partitions of packed sequences."""

import random

import pytest

from megatron.seq1f1b.partition import (
    Task,
    balanced,
    cut_sequence,
    segment_times,
    within_documents,
)
from megatron.seq1f1b.planning.costs import (
    A100,
    AnalyticTime,
    ModelShape,
    analytic_costs,
    authors_flops,
    bottleneck_time,
)
from megatron.seq1f1b.planning.costs.profile import MeasuredTime

MODEL = ModelShape(32, 4096, 16384, 32, 128, 51200)
COST = bottleneck_time(analytic_costs(MODEL, [8] * 4, A100))
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


def test_one_document_costs_what_an_unpacked_sequence_does():
    packed = within_documents(COST, [(0,)], EVERY_TOKEN)
    for first, last in ((0, 96), (10, 20), (95, 96)):
        assert packed(first, last) == pytest.approx(COST(first, last))


def test_measured_costs_tell_pairs_from_tokens():
    """A fit of measurements that take 3 for a token and 0.5 for a pair: the same numbers as by formula."""
    lengths = tuple(range(16, 128, 16))
    per_token = tuple(3 + 0.5 * (length + 1) / 2 for length in lengths)
    measured = within_documents(MeasuredTime(lengths, per_token, (0.0, 0.0, 0.0, 0.5)), DOCUMENTS, EVERY_TOKEN)
    formula = within_documents(AnalyticTime(per_token=3.0, per_pair=0.5), DOCUMENTS, EVERY_TOKEN)
    for first, last in ((0, 96), (0, 16), (3, 40), (30, 60), (60, 96)):
        assert measured(first, last) == pytest.approx(formula(first, last))


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


def test_a_long_document_gets_more_segments_than_short_ones():
    """32k tokens of one document have far more pairs than 32k tokens of small ones."""
    lengths = balanced(65536, 8, COST, documents=[(*range(0, 32768, 128), 32768)])
    assert max(lengths) == lengths[0] and sum(length for length in lengths[:3]) > 32768


@pytest.mark.parametrize("strategy", ["even", "uniform_comp"])
def test_other_strategies_take_no_notice(strategy):
    def cut(strategy, documents=None):
        return cut_sequence(strategy, Task(16384, 4, time=COST, flops=authors_flops(MODEL), documents=documents))

    documents = packed(16384, 100, 1)
    assert cut(strategy, documents) == cut(strategy)
    assert cut("balanced", documents) != cut("balanced")


def test_a_long_sequence_is_cut_with_few_looks_at_the_cost():
    looks = []
    documents = packed(131072, 500, 1)
    balanced(131072, 16, lambda start, end: looks.append(start) or COST(start, end), documents=documents)
    assert len(looks) < 20000
