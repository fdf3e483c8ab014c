"""The lowered schedule of one rank in a step: its actions, and what follows from them.

Tested in costs/test_stage_costs.py.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

from ..process.ranks import warn_on_rank_0
from ..schedule import (
    COMPUTE_KINDS,
    FAMILIES,
    Action,
    CostsOfLengths,
    Kind,
    Schedule,
    ScheduleChoice,
    Shape,
    lower_rank,
    partition_state,
    units_to_move,
    with_moves,
)

_MANY_FORWARDS = 5_000  # over all stages; from here on planning takes seconds
_KEPT = 16  # schedules: of training and evaluation, of first and later steps, of a few batch sizes


class RankSchedule:
    """The lowered actions of one rank; with `is_partitioned` they gather and release the parameters of chunks.

    - `paired`: the forwards that run beside the backward after them.
    - `planned`: a digest of the order of all ranks, if every rank has planned it by itself, else empty.
    - `moved`: the units, as (stage, micro-batch, segment), that go to the memory of the host and back.
    - `last_input_gradients`, `last_weight_gradients`: of each chunk, the last action that gives such gradients.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        is_partitioned: bool = False,
        paired: frozenset[Action] = frozenset(),
        planned: str = "",
    ) -> None:
        self.paired = paired
        self.planned = planned
        self.actions = tuple(partition_state(actions) if is_partitioned else actions)
        self.splits_backwards = any(action.kind is Kind.W for action in self.actions)
        self.moved = frozenset(action.unit for action in self.actions if action.kind is Kind.OFFLOAD)
        # Of the actions of a stage the last one stays.
        inputs = {action.stage: action for action in self.actions if action.kind.facts.gives_input_gradient}
        weights = {action.stage: action for action in self.actions if action.kind.facts.gives_weight_gradient}
        self.last_input_gradients = frozenset(inputs.values())
        self.last_weight_gradients = frozenset(weights.values())


class RankSchedules:
    """The schedules of this rank by the shape of a step, planned for `costs(lengths)` of segments of these lengths.

    `one_queue`: streams may share a hardware queue, so messages are issued in an order that cannot hang then.
    `offloaded`: the share of activations that moves to the host, as whole units or `by_layer`, see `units_to_move`.
    `of_step` caches `_of_step`.
    """

    def __init__(
        self,
        choice: ScheduleChoice,
        costs: CostsOfLengths | None = None,
        one_queue: bool = True,
        offloaded: float = 0.0,
        by_layer: bool = False,
    ) -> None:
        self._choice = choice
        self._one_queue = one_queue
        self._offloaded = offloaded
        self._by_layer = by_layer
        self._resolved = lru_cache(maxsize=1)(partial(choice.resolve, costs=costs))
        self.of_step = lru_cache(maxsize=_KEPT)(self._of_step)

    def _of_step(
        self,
        shape: Shape,
        lengths: tuple[int, ...],
        rank: int,
        forward_only: bool,
        in_turn: bool = False,
        is_partitioned: bool = False,
    ) -> RankSchedule:
        """The schedule of a step with segments of `lengths` tokens; raises ValueError if a given schedule has another
        shape."""
        with _without_collections():
            if forward_only:
                return RankSchedule(self._forwards_of_evaluation(shape, lengths, rank, in_turn), is_partitioned)
            if self._choice.is_auto and shape.num_stages * shape.num_units > _MANY_FORWARDS:
                warn_on_rank_0(f"Planning the order of a step on {shape}; the first step begins after that.")
            schedule = self._resolved(shape, lengths)
            actions = lower_rank(schedule, rank, self._one_queue, in_turn)
            order = [action for action in actions if action.kind in COMPUTE_KINDS]
            paired = schedule.pairs_in(order)
            if self._offloaded:
                units = units_to_move(order, self._offloaded, paired, self._by_layer)
                actions = with_moves(actions, units, paired, self._by_layer)
            planned = schedule.digest if self._choice.is_auto and isinstance(schedule, Schedule) else ""
            return RankSchedule(actions, is_partitioned, paired, planned)

    def _forwards_of_evaluation(
        self, shape: Shape, lengths: tuple[int, ...], rank: int, in_turn: bool
    ) -> Sequence[Action]:
        """What a training step has of forwards and their messages, by a named family, which has an order for any shape.
        The order of what remains is the same on both ends of every channel."""
        named = self._choice if self._choice.name in FAMILIES else ScheduleChoice("1f1b")
        actions = lower_rank(named.resolve(shape, lengths, None), rank, self._one_queue, in_turn)
        return [action for action in actions if action.kind.facts.in_evaluation]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Inside, Python collects no garbage: while many actions are made, that would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
