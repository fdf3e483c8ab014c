"""The sizes of a schedule, and the schedule itself: data, nothing else."""

from dataclasses import dataclass

from .action import Action
from .placement import Placement


@dataclass(frozen=True)
class Shape:
    """What a schedule has to cover: every stage of `placement` times every unit.

    A unit is one segment of one micro-batch; units are numbered micro-batch by micro-batch,
    segments ascending.
    """

    placement: Placement
    num_microbatches: int
    num_segments: int = 1

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or self.num_segments < 1:
            raise ValueError(
                "a schedule needs at least one micro-batch and one segment, "
                f"not {self.num_microbatches} and {self.num_segments}"
            )

    def __str__(self) -> str:
        chunks = f" with {self.num_chunks} model chunks ({self.placement.style})" if self.num_chunks > 1 else ""
        return f"{self.num_ranks} ranks{chunks}, {self.num_microbatches} micro-batches, {self.num_segments} segments"

    @property
    def num_units(self) -> int:
        return self.num_microbatches * self.num_segments

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages


@dataclass(frozen=True)
class Schedule:
    """For each rank, the actions that it runs, in order."""

    shape: Shape
    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: " + " ".join(map(str, actions)) for rank, actions in enumerate(self.ranks))
