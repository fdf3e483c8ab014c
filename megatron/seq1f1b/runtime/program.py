"""The program of one rank in a step: its lowered actions, and what follows from them.

Tested in costs/test_stage_costs.py.
"""

import gc
from collections.abc import Sequence
from functools import lru_cache, partial

from ..process.ranks import warn_on_rank_0
from ..schedule import (
    COMPUTE_KINDS,
    FAMILIES,
    Action,
    CostsOfLengths,
    Kind,
    ScheduleChoice,
    Shape,
    lower_rank,
    partition_state,
    units_to_move,
    with_moves,
)

_MANY_FORWARDS = 5_000  # over all stages; from here on planning takes seconds
_KEPT = 16  # programs: of training and evaluation, of first and later steps, of a few batch sizes


class Program:
    """The lowered actions of one rank; with `is_partitioned` they gather and release the parameters of chunks.

    `paired` are the forwards that run beside the backward after them; `moved` are the units, as (stage, micro-batch,
    segment), that go to the memory of the host and back; `ends` are the last action of each chunk with input gradients,
    as (I, action), and the last with weight gradients, as (W, action).
    """

    def __init__(
        self, actions: Sequence[Action], is_partitioned: bool = False, paired: frozenset[Action] = frozenset()
    ) -> None:
        self.paired = paired
        self.actions = tuple(partition_state(actions) if is_partitioned else actions)
        self.splits_backwards = any(action.kind is Kind.W for action in self.actions)
        self.moved = frozenset(action.unit for action in self.actions if action.kind is Kind.OFFLOAD)
        last_inputs = {action.stage: action for action in self.actions if action.kind.facts.gives_input_gradient}
        last_weights = {action.stage: action for action in self.actions if action.kind.facts.gives_weight_gradient}
        self.ends = {(Kind.I, action) for action in last_inputs.values()}
        self.ends |= {(Kind.W, action) for action in last_weights.values()}


class Programs:
    """The programs of this rank by the shape of a step, planned for `costs(lengths)` of segments of these lengths.

    `one_queue`: streams may share a hardware queue, so messages are issued in an order that cannot hang then.
    `offloaded`: the share of activations that moves to the host, as whole units or `by_layer`, see `units_to_move`.
    `program` caches `_program`.
    """

    def __init__(
        self,
        choice: ScheduleChoice,
        costs: CostsOfLengths | None = None,
        one_queue: bool = True,
        offloaded: float = 0.0,
        by_layer: bool = False,
    ) -> None:
        self.name = choice.title
        self.placement = choice.placement
        self.has_pairs = choice.pairs
        self._offloaded = offloaded
        self._by_layer = by_layer
        self._choice = choice
        self._one_queue = one_queue
        self._source = lru_cache(maxsize=1)(partial(choice.resolve, costs=costs))
        self.program = lru_cache(maxsize=_KEPT)(self._program)

    def _program(
        self,
        shape: Shape,
        lengths: tuple[int, ...],
        rank: int,
        forward_only: bool,
        in_turn: bool = False,
        is_partitioned: bool = False,
    ) -> Program:
        """The program of a step with segments of `lengths` tokens; raises ValueError if a given schedule has another
        shape."""
        was_enabled = gc.isenabled()
        gc.disable()  # while many actions are made, collections would take most of the time
        try:
            if forward_only:  # a named family has an order for any shape
                named = self._choice if self._choice.name in FAMILIES else ScheduleChoice("1f1b")
                actions = lower_rank(named.resolve(shape, lengths, None), rank, self._one_queue, in_turn)
                # The order of what remains is the same on both ends of every channel.
                return Program([action for action in actions if action.kind.facts.in_evaluation], is_partitioned)
            if self._choice.is_auto and shape.num_stages * shape.num_units > _MANY_FORWARDS:
                warn_on_rank_0(f"Planning the order of a step on {shape}; the first step begins after that.")
            source = self._source(shape, lengths)
            actions = lower_rank(source, rank, self._one_queue, in_turn)
            order = [action for action in actions if action.kind in COMPUTE_KINDS]
            paired = source.pairs_in(order)
            if self._offloaded:
                units = units_to_move(order, self._offloaded, paired, self._by_layer)
                actions = with_moves(actions, units, paired, self._by_layer)
            return Program(actions, is_partitioned, paired)
        finally:
            if was_enabled:
                gc.enable()
