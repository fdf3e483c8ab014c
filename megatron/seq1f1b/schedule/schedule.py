"""Which rank holds which stage, the sizes of a schedule, and the schedule itself."""

import hashlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

from .action import BESIDE, Action
from .kinds import COMPUTE_KINDS, MOVE_KINDS

PLACEMENTS = ("looped", "v")
"""The styles of a `Placement`."""

# What a rank runs at once: an action, or a forward and a backward.
Place = tuple[Action, ...]


@dataclass(frozen=True)
class Placement:
    """Maps the P*C stages, in the order of depth, to P ranks with C model chunks each.

    `looped` is Megatron's interleaved placement (arXiv 2104.04473, section 2.2): every chunk runs from rank 0 to P-1.
    In a `v` (arXiv 2401.10241, section 6) every second chunk runs back, so that a turn needs no message.
    """

    num_ranks: int
    num_chunks: int = 1
    style: str = "looped"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ValueError(
                f"a placement needs at least one rank and one model chunk, not {self.num_ranks} and {self.num_chunks}"
            )
        if self.style not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.style!r}; it is 'looped' or 'v'")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def turns(self) -> bool:
        """Whether the second chunk runs back, so that neighbouring stages share a rank."""
        return self.style == "v" and self.num_chunks > 1

    def chunk_of(self, stage: int) -> int:
        return stage // self.num_ranks

    def rank_of(self, stage: int) -> int:
        chunk, depth = divmod(stage, self.num_ranks)
        return self._mirrored(depth, chunk)

    def stage_of(self, rank: int, chunk: int) -> int:
        return chunk * self.num_ranks + self._mirrored(rank, chunk)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, from the first model chunk to the last."""
        if self.style == "looped":  # what `stage_of` gives, several times faster
            return list(range(rank, self.num_stages, self.num_ranks))
        return [self.stage_of(rank, chunk) for chunk in range(self.num_chunks)]

    def neighbours_of(self, rank: int) -> list[int]:
        """The other ranks that exchange messages with this one, ascending."""
        around = {stage + step for stage in self.stages_of(rank) for step in (-1, 1)}
        return sorted({self.rank_of(stage) for stage in around if 0 <= stage < self.num_stages} - {rank})

    def _mirrored(self, place: int, chunk: int) -> int:
        """The rank at a depth of a chunk, and the depth at a rank."""
        return self.num_ranks - 1 - place if self.style == "v" and chunk % 2 else place


@dataclass(frozen=True)
class Shape:
    """The extent of a schedule: every stage of `placement` times every unit.

    A unit is one segment of one micro-batch; units are numbered micro-batch by micro-batch, segments ascending. If
    micro-batches differ in their numbers of segments, `unequal` holds these (see `of`); `num_segments` is the largest.
    """

    placement: Placement
    num_microbatches: int
    num_segments: int = 1
    unequal: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or min((self.num_segments, *self.unequal)) < 1:
            raise ValueError(
                "a schedule needs at least one micro-batch and one segment, "
                f"not {self.num_microbatches} and {self.num_segments}"
            )

    @classmethod
    def of(cls, placement: Placement, segments: Sequence[int]) -> Self:
        """A shape from the number of segments of each micro-batch."""
        are_equal = min(segments) == max(segments)
        return cls(placement, len(segments), max(segments), () if are_equal else tuple(segments))

    def __str__(self) -> str:
        chunks = f" with {self.num_chunks} model chunks ({self.placement.style})" if self.num_chunks > 1 else ""
        segments = f"{min(self.unequal)} to {self.num_segments}" if self.unequal else self.num_segments
        return f"{self.num_ranks} ranks{chunks}, {self.num_microbatches} micro-batches, {segments} segments"

    def segments_of(self, microbatch: int) -> int:
        return self.unequal[microbatch] if self.unequal else self.num_segments

    @cached_property
    def first_units(self) -> Sequence[int]:
        """The number of the first unit of each micro-batch, then the number of all units."""
        if self.unequal:
            return tuple(accumulate(self.unequal, initial=0))
        return range(0, self.num_microbatches * self.num_segments + 1, self.num_segments)

    @property
    def num_units(self) -> int:
        return self.first_units[-1]

    @property
    def units(self) -> list[tuple[int, int]]:
        """All units as (micro-batch, segment), in the order of forwards."""
        return [(m, segment) for m in range(self.num_microbatches) for segment in range(self.segments_of(m))]

    @property
    def units_backward(self) -> list[tuple[int, int]]:
        """All units in the order of backwards: segments descending."""
        units: list[tuple[int, int]] = []
        for m in range(self.num_microbatches):
            units += [(m, segment) for segment in reversed(range(self.segments_of(m)))]
        return units

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
    """For each rank, the actions that it runs, in order: compute actions, and moves to the host, if any.

    `paired` are the forwards that run beside the backward directly after them, see pairs.py.
    """

    shape: Shape
    ranks: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()

    @property
    def has_moves(self) -> bool:
        """Whether activations go to the memory of the host and back."""
        return any(action.kind in MOVE_KINDS for actions in self.ranks for action in actions)

    def without_moves(self) -> Self:
        """This schedule with its compute actions only."""
        if not self.has_moves:
            return self
        ranks = (tuple(action for action in actions if action.kind in COMPUTE_KINDS) for actions in self.ranks)
        return replace(self, ranks=tuple(ranks))

    def pairs_in(self, order: Sequence[Action]) -> frozenset[Action]:
        """The forwards in the order of a rank that run beside the backward after them."""
        return self.paired.intersection(order)

    def texts(self, rank: int) -> list[str]:
        """The text form of the actions of a rank; that of a pair is `2F3.1|2B1.0`."""
        return [BESIDE.join(map(str, place)) for place in self.places(rank)]

    def places(self, rank: int) -> list[Place]:
        """The actions of a rank, those of a pair together."""
        return places(self.ranks[rank], self.paired)

    @cached_property
    def digest(self) -> str:
        """A short text, another one for every other schedule."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: " + " ".join(self.texts(rank)) for rank in range(len(self.ranks)))


def places(order: Iterable[Action], paired: Set[Action]) -> list[Place]:
    """The actions of an order, each by itself, but the forwards in `paired` with the action after them."""
    if not paired:
        return [(action,) for action in order]
    result: list[Place] = []
    is_open = False  # whether the last place waits for the backward of its pair
    for action in order:
        if is_open:
            result[-1] += (action,)
        else:
            result.append((action,))
        is_open = not is_open and action in paired
    return result
