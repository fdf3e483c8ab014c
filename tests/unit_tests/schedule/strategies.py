"""Random sizes and costs for the property tests, the same in every run."""

from math import ceil
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import Costs, Placement, Schedule, Shape, build, dependencies, parse_action
from megatron.seq1f1b.schedule.dependencies import outcome

fixed = settings(derandomize=True, deadline=None, max_examples=100)
few = settings(derandomize=True, deadline=None, max_examples=20)


@st.composite
def shapes(draw, ranks=6, microbatches=6, segments=5, chunks=4, styles=("looped", "v"), equal=False):
    """Micro-batches may have unequal numbers of segments, unless `equal`."""
    placement = Placement(draw(st.integers(1, ranks)), draw(st.integers(1, chunks)), draw(st.sampled_from(styles)))
    count, segment = draw(st.integers(1, microbatches)), st.integers(1, segments)
    if equal or draw(st.booleans()):
        return Shape(placement, count, draw(segment))
    return Shape.of(placement, draw(st.lists(segment, min_size=count, max_size=count)))


@st.composite
def full_groups(draw, least_chunks=1, least_groups=1):
    """Looped shapes whose micro-batches fill groups of k * ceil(P / k) units."""
    placement = Placement(draw(st.integers(1, 8)), draw(st.integers(least_chunks, 4)))
    segments = draw(st.integers(1, 8))
    groups = draw(st.integers(least_groups, least_groups + 2))
    return Shape(placement, groups * ceil(placement.num_ranks / segments), segments)


@st.composite
def costs(draw, shape):
    """Costs without structure: every stage and segment its own, some of them zero."""

    def table(strategy):
        row = st.tuples(*[strategy] * shape.num_segments)
        return draw(st.tuples(*[row] * shape.num_stages))

    ones = ((1.0,) * shape.num_segments,) * shape.num_stages
    cost, message = st.integers(0, 6), st.integers(0, 2)
    return Costs(table(cost), table(cost), table(cost), table(message), table(message), ones, ones)


def any_order(random: Random, shape: Shape) -> Schedule:
    """A random schedule that can run, far from any family."""
    waiting = {a: dependencies(a, shape) for order in build("1f1b", shape).ranks for a in order}
    orders, done = [[] for _ in range(shape.num_ranks)], set()
    while waiting:
        action = random.choice([a for a, needs in waiting.items() if done.issuperset(needs)])
        del waiting[action]
        done.add(outcome(action))
        orders[shape.placement.rank_of(action.stage)].append(action)
    return Schedule(shape, tuple(map(tuple, orders)))


def of(text: str, shape: Shape | None = None) -> Schedule:
    """A schedule from one line of actions for each rank."""
    ranks = tuple(tuple(map(parse_action, line.split())) for line in text.splitlines() or [""])
    return Schedule(shape or Shape(Placement(len(ranks)), 1, 1), ranks)
