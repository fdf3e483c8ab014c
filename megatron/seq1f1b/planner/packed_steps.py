"""Steps of sequences of unequal lengths in units of at most so many tokens, packed as in training: their set-ups and
orders of actions. `packed_bounds` bounds their seconds.

Tested in planner/test_unit_search.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import ceil, lcm
from statistics import fmean
from typing import NamedTuple

from ..costs.blocks import pairs
from ..costs.context_exchange import comm_type_of_segments
from ..costs.step_memory import RankOrder
from ..costs.training_setup import TrainingSetup
from ..partition import Pack, packs_of_step, work_by_flops
from ..schedule import Clock, Placement, Schedule, Shape, clock_of
from .rank_ends import Columns, RankEnds

# Lengths of units are rounded up to multiples of this part of the longest.
_PARTS = 64

type Steps = tuple[tuple[int, ...], ...]  # the lengths of the sequences of each
type Order = tuple[int, ...]  # the micro-batches of a replica in a step, by the numbers of their kinds


class MicroBatchKind(NamedTuple):
    """Micro-batches of units of these lengths, rounded up. `seen` are the pairs of a query and a key that each unit
    computes, in the mean over micro-batches of the kind, since time is linear in them."""

    lengths: tuple[int, ...]
    seen: tuple[float, ...]


class _Pipeline(NamedTuple):
    """What the order of the actions of a step depends on, beside its micro-batches."""

    family: str
    placement: Placement
    has_pairs: bool

    @classmethod
    def of(cls, setup: TrainingSetup) -> "_Pipeline":
        return cls(setup.family, setup.placement, setup.has_pairs)


class PackedSteps:
    """Steps in units; the last of them is the fullest one. `kinds` has every kind of micro-batch; `steps`, for each
    replica, the kinds of its micro-batches; `fullest` those of a replica with the longest sequence.

    A step of a replica has columns of costs for the units of the kinds in it, each kind once, and its actions have the
    numbers of these columns as segments."""

    def __init__(
        self, steps: Steps, most: int, multiple: int, replicas: int, flops: Sequence[int], equal_counts: bool
    ) -> None:
        part = lcm(multiple, max(1, most // _PARTS))

        def rounded(pack: Pack) -> tuple[int, ...]:
            return tuple(min(most, ceil(tokens / part) * part) for tokens in pack.lengths)

        numbers: dict[tuple[int, ...], int] = {}  # of kinds, by their lengths
        seen: defaultdict[int, list[list[float]]] = defaultdict(list)  # of the packs of a kind, by unit
        orders: list[list[Order]] = []  # of replicas, by step
        tokens = 0
        for lengths in steps:
            packs_of_replicas = packs_of_step(lengths, most, multiple, replicas, work_by_flops(*flops), equal_counts)
            of_step = []
            for packs in packs_of_replicas:
                order = []
                for pack in packs:
                    tokens += sum(pack.lengths)
                    kind = numbers.setdefault(rounded(pack), len(numbers))
                    seen[kind].append(seen_by_units(pack, lengths))
                    order.append(kind)
                of_step.append(tuple(order))
            orders.append(of_step)
        self.kinds = []
        for unit_lengths, kind in numbers.items():
            mean_by_unit = tuple(map(fmean, zip(*seen[kind], strict=True)))
            self.kinds.append(MicroBatchKind(unit_lengths, mean_by_unit))
        *self.steps, fullest_step = orders
        self.fullest = max(fullest_step, key=lambda order: max(sum(self.kinds[kind].lengths) for kind in order))
        self.longest = max(max(map(max, steps)), most)
        self.padding = 1 - sum(map(sum, steps)) / tokens
        # Candidates share parts, set-ups and orders.
        self.parts_of = lru_cache(maxsize=1024)(self._make_parts)
        self.setup_of = lru_cache(maxsize=4096)(self._make_setup)
        self._clock = lru_cache(maxsize=256)(self._make_clock)
        self._rank_order = lru_cache(maxsize=1024)(self._make_rank_order)
        self._rank_ends = lru_cache(maxsize=256)(self._make_rank_ends)

    def _make_parts(self, layer_setup: TrainingSetup) -> tuple[TrainingSetup, ...]:
        """A set-up for each kind, from one with a fixed value of all that does not matter to a single layer."""
        way = None if layer_setup.context_parallel == 1 else comm_type_of_segments(layer_setup)
        one_batch = layer_setup.but(longest=self.longest, cp_comm_type=way)
        return tuple(
            one_batch.but(sequence_length=sum(lengths), segments=lengths, seen=seen) for lengths, seen in self.kinds
        )

    def _make_setup(self, setup: TrainingSetup, order: Order) -> TrainingSetup:
        """The set-up of a step of a replica, from one for average units."""
        of_kinds = self.parts_of(setup.layer_setup)
        parts = tuple(of_kinds[kind] for kind in dict.fromkeys(order))  # each kind once, as it first comes
        columns = tuple(chain.from_iterable(part.segments for part in parts))
        return setup.but(
            sequence_length=sum(columns),
            num_microbatches=1,
            segments=columns,
            cp_comm_type=parts[0].cp_comm_type,
            seen=(),
            longest=self.longest,
            parts=parts,
        )

    def around_longest(self, count: int) -> Order:
        """The fullest step from `count` micro-batches before its longest one to as many after it."""
        longest = max(range(len(self.fullest)), key=lambda place: sum(self.kinds[self.fullest[place]].lengths))
        return self.fullest[max(0, longest - count) : longest + count + 1]

    def schedule(self, setup: TrainingSetup, order: Order) -> Schedule:
        """The step of a replica."""
        clock = self._clock(_Pipeline.of(setup), order)
        columns = self._columns(order)
        named = clock.schedule()
        ranks = tuple(tuple(columns.in_columns(actions)) for actions in named.ranks)
        paired = frozenset(columns.in_columns(named.paired))
        return Schedule(Shape(setup.placement, len(order), columns.number), ranks, paired)

    def rank_order(self, setup: TrainingSetup, order: Order, rank: int) -> RankOrder:
        """What one rank runs in the step of a replica."""
        return self._rank_order(_Pipeline.of(setup), order, rank)

    def rank_ends(self, setup: TrainingSetup, order: Order) -> RankEnds:
        """When the ranks of a replica end their compute, by costs that may change."""
        return self._rank_ends(_Pipeline.of(setup), order)

    def _make_clock(self, pipeline: _Pipeline, order: Order) -> Clock:
        shape = Shape.of(pipeline.placement, [len(self.kinds[kind].lengths) for kind in order])
        return clock_of(pipeline.family, shape, pipeline.has_pairs)

    def _make_rank_order(self, pipeline: _Pipeline, order: Order, rank: int) -> RankOrder:
        clock = self._clock(pipeline, order)
        columns = self._columns(order)
        actions = clock.order(rank)
        paired = frozenset(columns.in_columns(clock.pairs_in(actions)))
        return RankOrder(pipeline.placement, rank, columns.in_columns(actions), paired)

    def _make_rank_ends(self, pipeline: _Pipeline, order: Order) -> RankEnds:
        return RankEnds(self._clock(pipeline, order), self._columns(order))

    def _columns(self, order: Order) -> Columns:
        """The columns of costs of a step, as its set-up has them."""
        first: dict[int, int] = {}  # the first column of a kind
        num_columns = 0
        for kind in order:
            if kind not in first:
                first[kind] = num_columns
                num_columns += len(self.kinds[kind].lengths)
        return Columns([first[kind] for kind in order], num_columns)

    def num_units(self, order: Order) -> int:
        return sum(len(self.kinds[kind].lengths) for kind in order)


packed_steps = lru_cache(maxsize=256)(PackedSteps)


def seen_by_units(pack: Pack, lengths: Sequence[int]) -> list[float]:
    """The pairs of a query and a key of one sequence that each unit of a pack computes."""
    ends = [*accumulate(pack.lengths)]
    seen = [0.0] * len(ends)
    unit = 0
    now = 0
    for number in pack.sequences:
        start = now
        end = now + lengths[number]
        while now < end:
            stop = min(end, ends[unit])
            seen[unit] += pairs(now - start, stop - start, None)
            now = stop
            if now == ends[unit]:
                unit += 1
    return seen
