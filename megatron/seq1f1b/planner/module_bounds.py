"""How long a step of Megatron takes at least if ranks of a pipeline hold more than fits on their devices, so that a
part of the modules of every unit moves to the host. Sequences are whole.

A unit leaves after its forward, and a forward waits until the unit before the last one has left. So the first backward
of the first rank comes after nearly all copies of the units that the rank holds by then.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from math import ceil, inf
from typing import NamedTuple

from ..costs.layer_bytes import layer_moved, stage_moved
from ..costs.machine import Machine
from ..costs.stage_times import sums_of_stage
from ..costs.training_setup import Moves, StageLayers, TrainingSetup
from ..schedule import Action, Kind, Shape, clock_of, units_to_move
from ..schedule.schedule import places
from .bounds import least_seconds_cut, least_seconds_in_time
from .first_backward import backwards_like_the_first, units_at_first_backward
from .fitting import SHARES
from .memory_bounds import excess_of_first, excess_of_others
from .rank_ends import CopyTimes


def least_seconds_moving_modules(setup: TrainingSetup, machine: Machine, device: float) -> float:
    """A lower bound from the compute of ranks, and from copies before the first backward, with so many bytes on each
    device; inf if too little may move."""
    share = _least_share(setup, device)
    if share is None:
        return inf
    forwards = _forwards(setup, machine)
    held = units_at_first_backward(setup.family, setup.shape, setup.has_pairs)
    before = sum(units * forward for units, forward in zip(held, forwards, strict=True))
    waiting = max(0.0, _leaving(setup, machine, share, forwards) - before)
    return least_seconds_cut(setup, machine, segments=1, waiting=waiting)


def least_seconds_moving_modules_in_time(setup: TrainingSetup, machine: Machine, device: float) -> float:
    """A lower bound from the order of actions, and from the same copies; inf if too little may move."""
    share = _least_share(setup, device)
    if share is None:
        return inf
    later = len(backwards_like_the_first(setup.shape, setup.has_pairs)) - 1  # they wait for nothing here
    leaving = _leaving(setup, machine, share, _forwards(setup, machine))
    copies = CopyTimes((leaving,) + (0.0,) * later, returning=0.0)
    return least_seconds_in_time(setup.but(offloads=share, moves=Moves.MODULES), machine, copies)


def _forwards(setup: TrainingSetup, machine: Machine) -> list[float]:
    """Seconds of a forward on each chunk of the first rank."""
    stages = setup.stages
    numbers = setup.placement.stages_of(0)
    return [max(sums_of_stage(setup.layer_setup, machine, stages[number]).forward) for number in numbers]


def _leaving(setup: TrainingSetup, machine: Machine, share: float, forwards: Sequence[float]) -> float:
    """Seconds at least until the first backward of the first rank, with these forwards, if this share of all modules
    moves."""
    stages = setup.stages
    leaving = 0.0
    numbers = _units_left(setup.shape, setup.has_pairs)
    for stage, number in zip(setup.placement.stages_of(0), numbers, strict=True):
        leaving += number * _modules(setup.activation_setup, stages[stage]).of_unit
    return min(forwards) + share * leaving / machine.device.host_bandwidth


@lru_cache(maxsize=1 << 12)
def _units_left(shape: Shape, has_pairs: bool) -> list[int]:
    """How many units have left the first rank when its first backward may start, by chunk: all that move but the last
    one, which leaves beside it."""
    clock = clock_of("1f1b", shape, has_pairs)
    order = clock.order(0)
    paired = clock.pairs_in(order)
    moving = units_to_move(order, 1.0, paired)
    before = takewhile(_has_no_backward, places(order, paired))
    left = [action.stage for place in before for action in place if action.unit in moving][:-1]
    return [left.count(stage) for stage in shape.placement.stages_of(0)]


def _has_no_backward(place: tuple[Action, ...]) -> bool:
    return all(action.kind is Kind.F for action in place)


def _least_share(setup: TrainingSetup, device: float) -> float | None:
    """The least share of all modules that has to be on the host at the first backwards of all ranks; None if all of
    them are too few."""
    least = 0.0
    for rank, excess in {0: excess_of_first(setup, 1, device), **excess_of_others(setup, 1, device)}.items():
        if excess > 0:
            may_be_away = _may_be_away(setup, rank)
            if excess > may_be_away:
                return None
            least = max(least, excess / may_be_away)
    return ceil(SHARES * least) / SHARES


def _may_be_away(setup: TrainingSetup, rank: int) -> float:
    """The bytes that are on the host of a rank at its first backward, if all modules move. Two layers are on their
    way."""
    stages = setup.stages
    modules = [_modules(setup.activation_setup, stages[number]) for number in setup.placement.stages_of(rank)]
    held = units_at_first_backward(setup.family, setup.shape, setup.has_pairs, rank)
    away = sum(units * of_stage.of_unit for units, of_stage in zip(held, modules, strict=True))
    return away - 2 * modules[-1].of_layer


class _Modules(NamedTuple):
    """Bytes of the modules of a stage that may move to the host: of a unit, and of its largest layer."""

    of_unit: float
    of_layer: float


@lru_cache(maxsize=1 << 16)
def _modules(activation_setup: TrainingSetup, stage: StageLayers) -> _Modules:
    setup = activation_setup.but(offloads=1.0, moves=Moves.MODULES)
    whole = (0, setup.sequence_length)
    of_layers = (sum(layer_moved(setup, layer, *whole)) for layer, _ in stage.layers)
    return _Modules(stage_moved(setup, stage, *whole), max(of_layers, default=0.0))
