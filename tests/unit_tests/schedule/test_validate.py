import random
import re
from contextlib import nullcontext

import pytest

from megatron.seq1f1b.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    Shape,
    build,
    dependencies,
    parse_action,
    validate,
)
from megatron.seq1f1b.schedule.dependencies import outcome

from .strategies import of


def test_random_orders_are_judged_like_a_plain_replay():
    """Against a second judge: orders with actions exchanged, dropped and doubled, replayed step by step with sets."""
    randomness = random.Random(0)
    seen = set()
    for _ in range(300):
        shape = Shape(Placement(2, randomness.randint(1, 2)), 2, randomness.randint(1, 2))
        schedule = build(randomness.choice(["1f1b", "zb-h1"]), shape)
        ranks = [list(actions) for actions in schedule.ranks]
        for actions in ranks:
            for _ in range(randomness.randint(0, 2)):
                index = randomness.randrange(len(actions) - 1)
                actions[index : index + 2] = reversed(actions[index : index + 2])
            if randomness.random() < 0.05:
                actions.pop(randomness.randrange(len(actions)))
            if randomness.random() < 0.05:
                actions.insert(randomness.randint(0, len(actions)), randomness.choice(actions))
        todo, done, progress = [list(actions) for actions in ranks], set(), True
        while progress:
            progress = False
            for actions in todo:
                while actions and all(need in done for need in dependencies(actions[0], shape)):
                    done.add(outcome(actions.pop(0)))
                    progress = True
        can_run = not any(todo) and all(
            sorted(changed) == sorted(built) for changed, built in zip(ranks, schedule.ranks, strict=True)
        )
        seen.add(can_run)
        with nullcontext() if can_run else pytest.raises(ScheduleError):
            validate(Schedule(shape, tuple(map(tuple, ranks))))
    assert seen == {True, False}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "stage 0, micro-batch 0, segment 0 has no action"),
        ("0F0.0", "has F; each unit needs F and B, or F, I and W"),
        ("0B0.0", "has B; each"),
        ("0F0.0 0W0.0 0B0.0", "has F and W and B; each"),
        ("0F0.0 0B0.0 0I0.0 0W0.0", "has F and B and I and W; each"),
        ("0F0.0 0B0.0 0B0.0", "action 2: 0B0.0 is repeated"),
        ("0F0.0 0W0.0 0I0.0", "0W0.0 comes before 0I0.0, which it needs"),
        ("0B0.0 0F0.0", "0B0.0 comes before 0F0.0, which it needs"),
        ("0F1.0 0F0.0 0B0.0", "0F1.0 is no compute action of this rank; there are 1 ranks, 1 micro-"),
        ("0F0.1 0F0.0 0B0.0", "0F0.1 is no compute action of this rank"),
        ("0REDUCE 0F0.0 0B0.0", "0REDUCE is no compute action"),
        ("0OFFLOAD0.0 0F0.0 0RELOAD0.0 0B0.0", "0OFFLOAD0.0 does not follow the forward of its unit"),
        ("0F0.0 0OFFLOAD0.0 0OFFLOAD0.0 0RELOAD0.0 0B0.0", "action 2: 0OFFLOAD0.0 does not follow the forward"),
        ("0F0.0 0B0.0 0OFFLOAD0.0 0RELOAD0.0", "0OFFLOAD0.0 does not follow the forward of its unit"),
        ("0F0.0 0OFFLOAD0.0 0B0.0", "action 2: 0B0.0 needs activations that are on the host; RELOAD them before"),
        ("0F0.0 0OFFLOAD0.0 0I0.0 0RELOAD0.0 0W0.0", "0I0.0 needs activations that are on the host"),
        ("0F0.0 0RELOAD0.0 0B0.0", "0RELOAD0.0 reloads activations that are not on the host"),
        ("0F0.0 0OFFLOAD0.0 0RELOAD0.0 0RELOAD0.0 0B0.0", "action 3: 0RELOAD0.0 reloads activations that are not"),
        ("0F0.0 1F0.0 0B0.0\n1F0.0 1B0.0", "rank 0, action 1: 1F0.0 is no compute action of this rank"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(of(text))


def test_an_order_of_another_shape_is_rejected():
    with pytest.raises(ScheduleError, match="1 ranks given, 2 expected"):
        validate(of("0F0.0 0B0.0", Shape(Placement(2), 1)))
    with pytest.raises(ScheduleError, match="segments go backward in descending order"):
        validate(of("0F0.0 0F0.1 0B0.0 0B0.1", Shape(Placement(1), 1, 2)))


def test_a_full_backward_may_stand_next_to_a_split_one():
    validate(of("0F0.0 0F1.0 0B0.0 0I1.0 0W1.0\n1F0.0 1I0.0 1F1.0 1B1.0 1W0.0", Shape(Placement(2), 2)))


def test_the_neighbourhood_is_shown_rank_by_rank():
    schedule = build("1f1b", Shape(Placement(3), 2, 2))
    first, actions, last = schedule.ranks
    with pytest.raises(ScheduleError) as error:
        validate(Schedule(schedule.shape, (first, actions[:4] + actions[3:], last)))
    assert str(error.value).splitlines() == [
        "rank 1, action 4: 1B0.1 is repeated",
        "  rank 0    0F0.0   0F0.1   0F1.0   0F1.1  [0B0.1]  0B0.0   0B1.1   0B1.0",
        "> rank 1    1F0.0   1F0.1   1F1.0   1B0.1  [1B0.1]  1F1.1   1B0.0   1B1.1   1B1.0",
        "  rank 2    2F0.0   2F0.1   2B0.1   2F1.0  [2B0.0]  2F1.1   2B1.1   2B1.0",
    ]


def test_the_cycle_of_a_deadlock_is_shown():
    # Rank 0 wants the backward of 0 before the forward of 1, rank 1 the other way round.
    with pytest.raises(ScheduleError) as error:
        validate(of("0F0.0 0B0.0 0F1.0 0B1.0\n1F0.0 1F1.0 1B0.0 1B1.0", Shape(Placement(2), 2)))
    assert str(error.value).splitlines()[:3] == [
        "the schedule deadlocks; each of these waits for the next, in a cycle:",
        "rank 0: 0B0.0 needs 1B0.0 of rank 1, where 1F1.0 comes first",
        "rank 1: 1F1.0 needs 0F1.0 of rank 0, where 0B0.0 comes first",
    ]
    assert "> rank 0    0F0.0  [0B0.0]" in str(error.value)


def test_dependencies():
    shape = Shape(Placement(3), 2, 3)
    names = lambda text: sorted(map(str, dependencies(parse_action(text), shape)))  # noqa: E731
    assert names("0F1.0") == []
    assert names("1F1.2") == ["0F1.2", "1F1.1"]
    assert names("1B1.1") == names("1I1.1") == ["1B1.2", "1F1.1", "2B1.1"]
    assert names("2B0.2") == ["2F0.2"]
    assert names("1W1.1") == ["1B1.1"]
    with pytest.raises(ValueError, match="is not a compute action"):
        dependencies(Action(Kind.REDUCE, 0), shape)
