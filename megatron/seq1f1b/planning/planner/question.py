"""A question to the planner, and a candidate for its answer before anything is predicted."""

from dataclasses import dataclass

from ..costs import ModelShape
from ..costs.machine import Machine
from ..costs.memory import GIB
from ..costs.outside import bytes_outside
from ..costs.training_setup import TrainingSetup

# Of a process in half a dozen groups: tensor, context, pipeline, data and expert parallelism, and all ranks.
_OUTSIDE_GIB = bytes_outside(num_communicators=6) / GIB


@dataclass(frozen=True)
class Question:
    """A model, a number of devices of a machine, a length in tokens and a batch in sequences.

    `memory_gib` is what the allocator may take; None: what a device has, less what lies outside the allocator. The
    tuples are the choices that the search has; `auto` is tried on the winners of the named families.
    """

    model: ModelShape
    machine: Machine
    num_devices: int
    sequence_length: int
    global_batch_size: int
    memory_gib: float | None = None
    families: tuple[str, ...] = ("1f1b", "zb-h1", "breadth-first", "auto")
    strategies: tuple[str, ...] = ("even", "uniform_comp", "balanced")
    segments: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (1, 2, 4)
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    recomputes: tuple[str, ...] = ("none", "full")

    @property
    def memory_limit(self) -> float:
        """What the allocator may take, in GiB."""
        return self.machine.device.memory_gib - _OUTSIDE_GIB if self.memory_gib is None else self.memory_gib


@dataclass(frozen=True)
class Candidate:
    """A set-up, with the name of the strategy that cut its sequences."""

    setup: TrainingSetup
    strategy: str = "even"
