"""The memory of units that move to the host and back layer by layer (model/memory/host_memory.py). Bytes."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedule import Action, Kind, Unit
from ..schedule.schedule import places
from .layer_bytes import Phase, Sizes, changes_of, moved_bytes
from .training_setup import TrainingSetup


class _OnTheWay(NamedTuple):
    """While action number `number` runs, so many layers of the unit of `action` are at work, leave or come back."""

    number: int
    action: Action
    layers: int


class _Columns(NamedTuple):
    """Layers on the way as columns of numbers."""

    number: NDArray[np.int64]
    stage: NDArray[np.int64]
    segment: NDArray[np.int64]
    layers: NDArray[np.int64]


def _columns(on_the_way: Iterable[_OnTheWay]) -> _Columns:
    rows = [(number, action.stage, action.segment, layers) for number, action, layers in on_the_way]
    return _Columns(*np.array(rows, dtype=int).reshape(-1, 4).T)


class _Places(NamedTuple):
    """Where actions are in the order of a rank, and their segments."""

    number: list[int]
    segment: list[int]


def _by_stage(actions: Iterable[tuple[int, Action]]) -> dict[int, _Places]:
    """Actions, each with its number in the order, by stage."""
    by_stage: dict[int, _Places] = {}
    for number, action in actions:
        of_stage = by_stage.setdefault(action.stage, _Places([], []))
        of_stage.number.append(number)
        of_stage.segment.append(action.segment)
    return by_stage


class UnitsByLayer:
    """Units of a rank that are away for all but their own forwards and backwards."""

    def __init__(self, actions: Sequence[Action], away: Set[Unit], paired: Set[Action], layers_leaving: int) -> None:
        """`actions` compute, and those in `paired` run beside the next; the units `away` move."""
        self._actions = actions
        self._away = away
        self._numbers_of_places: list[range] = []
        num_before = 0
        for place in places(actions, paired):
            self._numbers_of_places.append(range(num_before, num_before + len(place)))
            num_before += len(place)
        self._layers_leaving = layers_leaving
        self._known: dict[tuple[int, ...], _Columns] = {}  # by the layers of all stages
        moving = [(number, action) for number, action in enumerate(actions) if action.unit in away]
        self._forwards = _by_stage((number, action) for number, action in moving if action.kind is Kind.F)
        self._backwards = _by_stage(
            (number, action) for number, action in moving if action.kind.facts.gives_input_gradient
        )

    def stay_away(self, setup: TrainingSetup, of_actions: Sizes) -> None:
        """Change what actions add, by [action, Phase, Use]: a forward leaves here what does not move, and a backward
        frees that."""
        layer_setup = setup.layer_setup
        stages = setup.stages
        for stage, forwards in self._forwards.items():
            leaving = changes_of(layer_setup, stages[stage], Kind.OFFLOAD)[forwards.segment, Phase.ENDS]
            of_actions[forwards.number, Phase.STARTS] += leaving
        for stage, backwards in self._backwards.items():
            leaving = changes_of(layer_setup, stages[stage], Kind.OFFLOAD)[backwards.segment, Phase.ENDS]
            of_actions[backwards.number, Phase.ENDS] -= leaving

    def bytes_on_their_way(self, setup: TrainingSetup) -> Sizes:
        """What layers of these units take at each action while they are at work, leave or come back."""
        layers = setup.layers_per_stage
        if layers not in self._known:
            self._known[layers] = _columns(self._on_their_way(layers))
        known = self._known[layers]
        moved = np.array(moved_bytes(setup))
        depths = np.maximum(1, layers)
        sizes = np.zeros(len(self._actions))
        np.add.at(sizes, known.number, known.layers * moved[known.stage, known.segment] / depths[known.stage])
        return sizes

    def _on_their_way(self, layers: Sequence[int]) -> Iterator[_OnTheWay]:
        """At the end of a layer of a forward at most some leave beside the next one. A backward frees one of these with
        each layer that comes back, while another is on its way; its first comes back beside the action ahead."""
        most = self._layers_leaving
        leaving = 0  # layers that still leave when a place begins
        leaver = None  # their forward
        for position, place in enumerate(self._numbers_of_places):
            first = place[0]
            last = place[-1]
            moving = [self._actions[number] for number in place if self._actions[number].unit in self._away]
            forward = next((action for action in moving if action.kind is Kind.F), None)
            backward = next((action for action in moving if action.kind.facts.gives_input_gradient), None)
            if backward is not None:
                depth = max(1, layers[backward.stage])
                ahead = self._numbers_of_places[position - 1] if position else range(0)
                yield from (_OnTheWay(number, backward, 1) for number in ahead)
                yield _OnTheWay(first, backward, min(2, depth))
                if last != first:
                    yield _OnTheWay(last, backward, 1)
            if forward is not None:
                depth = max(1, layers[forward.stage])
                if last != first:
                    yield _OnTheWay(first, forward, leaving + 1)
                yield _OnTheWay(last, forward, min(most, leaving + depth - 1) + 1)
                leaving = min(most - 1, leaving + depth)
                leaver = forward
            elif leaver is not None and leaving:
                left = leaving if backward is None else leaving - 1
                yield from (_OnTheWay(number, leaver, left) for number in place)
            if backward is not None:
                leaving = max(0, leaving - max(1, layers[backward.stage]))
