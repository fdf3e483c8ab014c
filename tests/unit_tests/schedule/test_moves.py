"""Activations that go to the memory of the host and back: which, when, and what is not valid."""

from itertools import accumulate
from random import Random

import pytest

from megatron.seq1f1b.schedule import (
    COMPUTE_KINDS,
    FAMILIES,
    MOVE_KINDS,
    Kind,
    Placement,
    Shape,
    build,
    lower,
    moved,
    units_to_move,
    validate,
    with_moves,
)
from megatron.seq1f1b.schedule.dependencies import outcome
from megatron.seq1f1b.schedule.moves import SHORTEST

from .strategies import any_order, of


def test_random_schedules_with_moves_run():
    """With the messages of the schedule without moves, none of which can hang."""
    random, moves = Random(0), 0
    for _ in range(100):
        placement = Placement(random.randint(1, 3), random.randint(1, 2), random.choice(["looped", "v"]))
        plain = any_order(random, Shape(placement, random.randint(1, 3), random.randint(1, 3)))
        schedule = moved(plain, random.random())
        validate(schedule)
        alone, together = lower(plain, one_queue=True), lower(schedule, one_queue=True)
        for order, without, lowered in zip(schedule.ranks, alone.ranks, together.ranks, strict=True):
            moves += sum(action.kind in MOVE_KINDS for action in order)
            assert without == tuple(action for action in lowered if action.kind not in MOVE_KINDS)
            assert order == tuple(action for action in lowered if action.kind in COMPUTE_KINDS + MOVE_KINDS)
    assert moves > 200


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_holds_that_share_less(family, share):
    """Or nothing that could move: units whose backward comes soon stay."""
    for order in build(family, Shape(Placement(4, 2), 4, 6)).ranks:
        units = units_to_move(order, share)
        index_of = {outcome(action): index for index, action in enumerate(order)}
        most = max(accumulate((a.kind is Kind.F) - (a.kind in (Kind.B, Kind.I)) for a in order))
        room = round((1 - share) * most)
        here = set()
        for action in order:
            if action.unit in units:
                continue
            if action.kind is Kind.F:
                here.add(action.unit)
            elif action.kind is not Kind.W:
                here.remove(action.unit)
            waits = [index_of[Kind.B, *unit] - index_of[Kind.F, *unit] for unit in here]
            assert len(here) <= room or max(waits) < SHORTEST
        assert bool(units) == (share > 0)


def test_the_last_backward_moves_first():
    words = [f"0F{number}" for number in range(6)] + [f"0B{number}" for number in (5, 4, 3, 2, 0, 1)]
    (order,) = of(" ".join(words)).ranks
    assert units_to_move(order, 0.2) == {(0, 1, 0)}
    assert " ".join(map(str, with_moves(order, {(0, 1, 0)}))) == (
        "0F0.0 0F1.0 0OFFLOAD1.0 0F2.0 0F3.0 0F4.0 0F5.0 0B5.0 0B4.0 0B3.0 0RELOAD1.0 0B2.0 0B0.0 0B1.0"
    )
    with pytest.raises(ValueError, match="^--offload-activations 1.5 is not between 0 and 1"):
        units_to_move(order, 1.5)


def test_a_unit_leaves_after_its_message():
    schedule = moved(build("gpipe", Shape(Placement(2), 8)), 1.0)
    words = " ".join(map(str, lower(schedule).ranks[0]))
    assert words.startswith("0GATHER 0F0.0 0SEND_F0.0 0OFFLOAD0.0 0F1.0 0SEND_F1.0 0OFFLOAD1.0 0F2.0")


def test_layer_by_layer_units_come_back_beside_one_action():
    """And those that have one action between their forward and their backward move, too."""
    words = [f"0F{number}" for number in range(3)] + [f"0B{number}" for number in (1, 0, 2)]
    (order,) = of(" ".join(words)).ranks
    units = units_to_move(order, 1.0, by_layer=True)
    assert units == {(0, 0, 0), (0, 1, 0), (0, 2, 0)} and not units_to_move(order, 1.0)
    assert " ".join(map(str, with_moves(order, units, by_layer=True))) == (
        "0F0.0 0OFFLOAD0.0 0F1.0 0OFFLOAD1.0 0RELOAD1.0 0F2.0 0OFFLOAD2.0 0RELOAD0.0 0B1.0 0RELOAD2.0 0B0.0 0B2.0"
    )
