"""Steps predicted from single actions: draws from what was measured, by rounds (`benchmarking.profile`)."""

import random
from itertools import accumulate, pairwise

import pytest

from benchmarking.prediction import predicted_seconds
from benchmarking.profile import mean_seconds, profile_of, seconds_between
from benchmarking.variants import Variant
from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.schedule import Costs, Kind, Placement, Shape, Span, build, lower

TOKENS = 64
MESSAGE = 0.25


def seconds(kind, start, end):
    """Of a segment, by a formula that a fit finds exactly."""
    of_token = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.25, Kind.W: 0.75}[kind] / 16
    return of_token * (end - start) * (1 + start / 256)


def run(family, num_segments, steps, num_microbatches=4):
    """A run whose actions take `seconds` times what a step of `steps` says about each, by its kind and rank."""
    shape = Shape(Placement(2), num_microbatches, num_segments)
    lengths = (TOKENS // num_segments,) * num_segments
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    lowered = lower(build(family, shape))
    spans = []
    for factor in steps:
        drawn = {
            action: factor(action.kind, rank) * seconds(action.kind, *bounds[action.segment])
            for rank, actions in enumerate(build(family, shape).ranks)
            for action in actions
        }
        timeline = execute_lowered(lowered, Costs.uniform(shape, message=MESSAGE), drawn=drawn)
        spans.append([list(of_rank) for of_rank in timeline.ranks])
    variant = Variant(name=family, schedule=family, model=[], step=lambda: None, shape=shape, lengths=lengths)
    variant.spans = spans
    return variant


def makespan(step):
    return max(span.end for rank in step for span in rank)


@pytest.mark.parametrize("family, others", [("1f1b", "gpipe"), ("zb-h1", "1f1b")])
def test_one_observation_gives_the_plain_prediction(family, others):
    """From another family, from halves of backwards to whole ones, and to segments of another length."""
    profile = profile_of([run(family, num_segments, [lambda kind, rank: 1.0]) for num_segments in (1, 4, 8)])
    for num_segments in (1, 2):
        other = run(others, num_segments, [lambda kind, rank: 1.0])
        assert predicted_seconds(other, profile, MESSAGE) == pytest.approx(makespan(other.spans[0]))


def test_a_slow_round_is_slow_on_all_ranks():
    """Half of the drawn steps take what a step took in one round, half what it took in the other."""
    steps = [lambda kind, rank: 1.0, lambda kind, rank: 1.5]
    profile = profile_of([run("1f1b", num_segments, steps) for num_segments in (1, 2)])
    plain, slow = (makespan(step) for step in run("1f1b", 2, steps).spans)
    assert predicted_seconds(run("1f1b", 2, steps), profile, MESSAGE) == pytest.approx((plain + slow) / 2, rel=1e-3)


def test_chance_delays_make_a_step_longer_than_their_means():
    generator = random.Random(7)
    steps = 8 * [lambda kind, rank: generator.choice([0.7, 1.3])]
    runs = [run("1f1b", num_segments, steps) for num_segments in (1, 4)]
    whole = runs[0]
    means = mean_seconds(whole.spans)
    actions = [span.action for rank in whole.spans[0] for span in rank]
    drawn = {action: means[action.kind, action.stage, 0] for action in actions}
    costs = Costs.uniform(whole.shape, message=MESSAGE)
    by_means = execute_lowered(lower(build("1f1b", whole.shape)), costs, drawn=drawn).makespan
    predicted = predicted_seconds(whole, profile_of(runs), MESSAGE)
    measured = sum(map(makespan, whole.spans)) / len(whole.spans)
    assert predicted > 1.03 * by_means
    assert predicted == pytest.approx(measured, rel=0.05)


def test_waits_for_messages_are_not_time_between_actions():
    """The last stage waits for its forwards only, the first for its backwards."""
    shape = Shape(Placement(2), 2)
    first, last = build("gpipe", shape).ranks
    step = [[], []]
    for rank, actions, pauses in ((0, first, (0, 1, 9, 9)), (1, last, (9, 9, 2, 4))):
        now = 0.0
        for action, pause in zip(actions, pauses, strict=True):
            step[rank].append(Span(action, now + pause, now + pause + 1))
            now += pause + 1
    assert seconds_between(step, shape) == [1, 2, 4]
