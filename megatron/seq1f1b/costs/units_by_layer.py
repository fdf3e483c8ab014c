"""The memory of units that move to the host and back layer by layer (model/memory/host_memory.py). Bytes."""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from ..schedule import Action, Kind, Unit
from ..schedule.schedule import places
from .layer_bytes import Phase, Sizes, changes_of, moved_bytes
from .training_setup import TrainingSetup


class _OnTheWay(NamedTuple):
    """While action number `number` runs, so many layers of the unit of `action` are at work, leave or come back."""

    number: int
    action: Action
    layers: int


class UnitsByLayer:
    """Units of a rank that are away for all but their own forwards and backwards."""

    def __init__(self, actions: Sequence[Action], away: Set[Unit], paired: Set[Action], layers_leaving: int) -> None:
        """`actions` compute, and those in `paired` run beside the next; the units `away` move."""
        numbers = iter(range(len(actions)))
        self._actions = actions
        self._away = away
        self._placed = [[next(numbers) for _ in place] for place in places(actions, paired)]
        self._layers_leaving = layers_leaving
        self._known: dict[tuple[int, ...], list[_OnTheWay]] = {}  # by the layers of all stages

    def stay_away(self, setup: TrainingSetup, of_actions: Sizes) -> None:
        """Change what actions add, by [action, Phase, Use]: a forward leaves here what does not move, and a backward
        frees that."""
        for number, action in enumerate(self._actions):
            if action.unit not in self._away:
                continue
            leaving = changes_of(setup.alone, setup.stages[action.stage], Kind.OFFLOAD)[action.segment, Phase.ENDS]
            if action.kind is Kind.F:
                of_actions[number, Phase.STARTS] += leaving
            elif action.kind.facts.gives_input_gradient:
                of_actions[number, Phase.ENDS] -= leaving

    def bytes_on_their_way(self, setup: TrainingSetup) -> Sizes:
        """What layers of these units take at each action while they are at work, leave or come back."""
        layers = setup.layers_per_stage
        if layers not in self._known:
            self._known[layers] = [*self._on_their_way(layers)]
        moved = moved_bytes(setup)
        sizes = np.zeros(len(self._actions))
        for number, (_, stage, _, segment), count in self._known[layers]:
            sizes[number] += count * moved[stage][segment] / max(1, layers[stage])
        return sizes

    def _on_their_way(self, layers: Sequence[int]) -> Iterator[_OnTheWay]:
        """At the end of a layer of a forward at most some leave beside the next one. A backward frees one of these with
        each layer that comes back, while another is on its way; its first comes back beside the action ahead."""
        most = self._layers_leaving
        leaving = 0  # when a place begins
        leaver = None  # the forward that they are of
        for position, place in enumerate(self._placed):
            first = place[0]
            last = place[-1]
            moving = [self._actions[number] for number in place if self._actions[number].unit in self._away]
            forward = next((action for action in moving if action.kind is Kind.F), None)
            backward = next((action for action in moving if action.kind.facts.gives_input_gradient), None)
            if backward is not None:
                depth = max(1, layers[backward.stage])
                ahead = self._placed[position - 1] if position else []
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
                left = leaving - (backward is not None)
                yield from (_OnTheWay(number, leaver, left) for number in place)
            if backward is not None:
                leaving = max(0, leaving - max(1, layers[backward.stage]))
