"""What pairs hide at most follows from the units that run alone."""

from collections import Counter
from random import Random

import pytest

from megatron.seq1f1b.planner.pair_bounds import units_alone
from megatron.seq1f1b.schedule import Kind, Placement, Shape, clock_of


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_as_many_units_run_alone_as_the_bound_says(family):
    """Of each chunk and segment, in random shapes: whole micro-batches, and the first segments of another. Where all
    turns are of one length these are all that run alone."""
    draw = Random(family)
    for _ in range(60):
        ranks = draw.randint(1, 6)
        chunks = draw.randint(1, 4) if ranks > 1 else 1
        shape = Shape(Placement(ranks, chunks), draw.randint(1, 9), draw.choice((1, 2, 3, 4, 8)))
        for rank, by_chunk in enumerate(units_alone(shape)):
            forwards, backwards = _alone(family, shape, rank)
            for chunk, number in enumerate(by_chunk):
                microbatches, segments = divmod(number, shape.num_segments)
                for segment in range(shape.num_segments):
                    least = microbatches + (segment < segments)
                    assert forwards[chunk, segment] >= least and backwards[chunk, segment] >= least
            if chunks == 1:
                assert forwards.total() == backwards.total() == sum(by_chunk)


def _alone(family: str, shape: Shape, rank: int) -> tuple[Counter, Counter]:
    """The forwards and the input gradients of a rank that no other runs beside, by chunk and segment."""
    clock = clock_of(family, shape, has_pairs=True)
    order = clock.order(rank)
    paired = clock.pairs_in(order)
    forwards: Counter = Counter()
    backwards: Counter = Counter()
    is_beside = False  # the action before runs beside this one
    for action in order:
        place = shape.placement.chunk_of(action.stage), action.segment
        if action.kind is Kind.F:
            forwards[place] += action not in paired
        elif action.kind is not Kind.W:
            backwards[place] += not is_beside
        is_beside = action in paired
    return forwards, backwards
