"""Units on the link of a rank to the memory of its host.

Tested in costs/test_simulator.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..schedule import Action
from ..schedule.cost_tables import Table
from .layer_bytes import moved_bytes
from .machine import Machine
from .training_setup import TrainingSetup


class LayersOnLink(NamedTuple):
    """Units move layer by layer: how many each stage has, and how many may still leave when a forward ends."""

    of_stages: tuple[int, ...]
    leaving: int

    def share(self, action: Action) -> float:
        """The part of the unit of an action that is one layer."""
        return 1 / max(1, self.of_stages[action.stage])


def layers_on_link(setup: TrainingSetup, stages: Sequence[int]) -> LayersOnLink | None:
    """How the layers of these stages move; None if units move as a whole."""
    if not setup.moves_by_layer:
        return None
    return LayersOnLink(tuple(setup.layers_per_stage[stage] for stage in stages), setup.layers_leaving)


def copy_seconds(setup: TrainingSetup, machine: Machine, stages: Sequence[int]) -> Table:
    """Seconds in which a unit, or the part of it that moves, goes to the host, by these stages and by segment."""
    bandwidth = machine.device.host_bandwidth
    moved = moved_bytes(setup)
    return tuple(tuple(size / bandwidth for size in moved[stage]) for stage in stages)
