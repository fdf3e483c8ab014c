"""Cuts that are tried by the step that they make."""

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.partition import balanced
from megatron.seq1f1b.partition.balanced import shortest_step


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
