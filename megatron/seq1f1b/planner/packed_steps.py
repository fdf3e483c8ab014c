"""Steps of sequences of unequal lengths in units of at most so many tokens, packed as in training: their set-ups,
orders of actions and bounds.

Tested in planner/test_unit_search.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import ceil, lcm
from statistics import fmean
from typing import NamedTuple

from ..costs.blocks import pairs
from ..costs.context_exchange import comm_type_of_segments
from ..costs.machine import Machine
from ..costs.pair_times import pair_times
from ..costs.stage_times import rows_of_stages, step_costs, step_end
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


class _Work(NamedTuple):
    """Seconds of a micro-batch on each stage: all compute, its first forward, and its last backward, of the same
    unit."""

    of_stages: list[float]
    first_forward: list[float]
    last_backward: list[float]


class PackedSteps:
    """Steps in units; the last of them is the fullest one. `kinds` has every kind of micro-batch; `steps`, for each
    replica, the kinds of its micro-batches; `fullest` those of a replica with the longest sequence.

    A step of a replica has columns of costs for the units of the kinds in it, each kind once, and its actions have the
    numbers of these columns as segments."""

    def __init__(
        self, steps: Steps, most: int, multiple: int, replicas: int, flops: Sequence[int], equal_counts: bool
    ) -> None:
        part = lcm(multiple, max(1, most // _PARTS))

        def kind_of(pack: Pack) -> tuple[int, ...]:
            return tuple(min(most, ceil(tokens / part) * part) for tokens in pack.lengths)

        seen: defaultdict[tuple[int, ...], list[list[float]]] = defaultdict(list)
        by_kind = []
        tokens = 0
        for lengths in steps:
            shares = packs_of_step(lengths, most, multiple, replicas, work_by_flops(*flops), equal_counts)
            tokens += sum(sum(pack.lengths) for share in shares for pack in share)
            by_kind.append([[kind_of(pack) for pack in share] for share in shares])
            for pack in chain(*shares):
                seen[kind_of(pack)].append(seen_by_units(pack, lengths))
        numbers = {kind: number for number, kind in enumerate(seen)}
        self.kinds = []
        for lengths, of_packs in seen.items():
            mean_by_unit = tuple(map(fmean, zip(*of_packs, strict=True)))
            self.kinds.append(MicroBatchKind(lengths, mean_by_unit))

        def numbered(of_replicas: list[list[tuple[int, ...]]]) -> list[Order]:
            return [tuple(numbers[kind] for kind in order) for order in of_replicas]

        self.steps = [numbered(of_step) for of_step in by_kind[:-1]]
        fullest_step = numbered(by_kind[-1])
        self.fullest = max(fullest_step, key=lambda order: max(sum(self.kinds[kind].lengths) for kind in order))
        self.longest = max(max(map(max, steps)), most)
        self.padding = 1 - sum(map(sum, steps)) / tokens
        # Candidates share parts, set-ups and orders.
        self._parts_of = lru_cache(maxsize=1024)(self._make_parts)
        self.setup_of = lru_cache(maxsize=4096)(self._make_setup)
        self._work = lru_cache(maxsize=1024)(self._make_work)
        self._after = lru_cache(maxsize=1024)(self._find_after)
        self._most_saved = lru_cache(maxsize=1024)(self._find_most_saved)
        self.likely_slowest = lru_cache(maxsize=1024)(self._find_likely_slowest)
        self._clock = lru_cache(maxsize=256)(self._make_clock)
        self._rank_order = lru_cache(maxsize=1024)(self._make_rank_order)
        self._rank_ends = lru_cache(maxsize=256)(self._make_rank_ends)

    def _make_parts(self, alone: TrainingSetup) -> tuple[TrainingSetup, ...]:
        """A set-up for each kind, from one with a fixed value of all that does not matter to a single layer."""
        way = None if alone.context_parallel == 1 else comm_type_of_segments(alone)
        one_batch = alone.but(longest=self.longest, cp_comm_type=way)
        return tuple(
            one_batch.but(sequence_length=sum(lengths), segments=lengths, seen=seen) for lengths, seen in self.kinds
        )

    def _make_setup(self, setup: TrainingSetup, order: Order) -> TrainingSetup:
        """The set-up of a step of a replica, from one for average units."""
        of_kinds = self._parts_of(setup.alone)
        parts = tuple(of_kinds[kind] for kind in dict.fromkeys(order))
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
        first = {}
        number = 0
        for kind in dict.fromkeys(order):
            first[kind] = number
            number += len(self.kinds[kind].lengths)
        return Columns([first[kind] for kind in order], number)

    def _find_likely_slowest(self, setup: TrainingSetup, machine: Machine) -> list[Order]:
        """The replica of each step with the most compute, if its bubble is P - 1 units."""
        of_kinds = [sum(work.of_stages) for work in self._work(setup.alone, setup.layers_per_stage, machine)]
        bubble = (setup.pipeline_parallel - 1) / setup.placement.num_chunks  # in units

        def seconds(order: Order) -> float:
            return sum(of_kinds[kind] for kind in order) * (1 + bubble / self._num_units(order))

        return [max(step, key=seconds) for step in self.steps]

    def least_seconds_of_compute(self, setup: TrainingSetup, machine: Machine, order: Order) -> float:
        """A lower bound for the step of a replica from the compute of each rank, before which the ranks before it run
        the first unit, and after which they run its last backward."""
        work = self._work(setup.alone, setup.layers_per_stage, machine)
        counts = Counter(order)
        of_stages = [0.0] * setup.placement.num_stages
        for kind, count in counts.items():
            for stage, seconds in enumerate(work[kind].of_stages):
                of_stages[stage] += count * seconds
        hidden = 0.0
        if setup.has_pairs:
            hidden = self._most_saved(setup, machine) * self._num_units(order) * setup.placement.num_chunks
        ends = []
        around = 0.0
        for rank in range(setup.pipeline_parallel):
            ends.append(around + sum(of_stages[stage] for stage in setup.placement.stages_of(rank)) - hidden)
            around += work[order[0]].first_forward[rank]
            if not setup.splits_backward:  # weight gradients may come after the last input gradient
                around += work[order[-1]].last_backward[rank]
        return self._with_end(ends, setup, machine)

    def least_seconds(self, setup: TrainingSetup, machine: Machine, order: Order) -> float:
        """A lower bound for the step of a replica from compute and messages in time, as if messages shared no port."""
        of_step = self.setup_of(setup, order)
        saved = pair_times(of_step, machine) if setup.has_pairs else None
        ends = self._rank_ends(_Pipeline.of(setup), order).by(step_costs(of_step, machine), saved)
        return self._with_end(ends, setup, machine)

    def _make_work(self, alone: TrainingSetup, layers_per_stage: tuple[int, ...], machine: Machine) -> list[_Work]:
        """The work of a micro-batch of each kind. Kinds whose units but the last are the first ones of the longest kind
        share the times of these."""
        parts = self._parts_of(alone)
        longest = max(self.kinds, key=lambda kind: len(kind.lengths))
        rows_of_longest = rows_of_stages(parts[self.kinds.index(longest)], machine, layers_per_stage)
        sums = [[*accumulate(map(sum, zip(*rows, strict=True)), initial=0.0)] for rows in rows_of_longest]
        found = []
        for kind, part in zip(self.kinds, parts, strict=True):
            shared = len(kind.lengths) - 1
            if shared and kind.lengths[:-1] == longest.lengths[:shared] and kind.seen[:-1] == longest.seen[:shared]:
                # The last unit alone, behind one segment in place of those before it.
                last = part.but(segments=(sum(kind.lengths[:-1]), kind.lengths[-1]), seen=(0.0, kind.seen[-1]))
                rows = rows_of_stages(last, machine, layers_per_stage)
                of_stages = [
                    sums_of_stage[shared] + f[1] + i[1] + w[1]
                    for sums_of_stage, (f, i, w) in zip(sums, rows, strict=True)
                ]
                first_unit = rows_of_longest
            else:
                first_unit = rows_of_stages(part, machine, layers_per_stage)
                of_stages = [sum(map(sum, rows)) for rows in first_unit]
            found.append(
                _Work(
                    of_stages=of_stages,
                    first_forward=[f[0] for f, _, _ in first_unit],
                    last_backward=[i[0] + w[0] for _, i, w in first_unit],
                )
            )
        return found

    def _find_after(self, setup: TrainingSetup, machine: Machine) -> tuple[list[float], float]:
        """What follows the compute of a step: the sums of gradients of each rank, and all else, in seconds."""
        ends = [step_end(setup, machine, rank) for rank in range(setup.pipeline_parallel)]
        others = max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step
        return [end.reduce for end in ends], others

    def _with_end(self, ends: Sequence[float], setup: TrainingSetup, machine: Machine) -> float:
        """The seconds of a step, from the ends of the compute of its ranks."""
        reduce, others = self._after(setup, machine)
        return max(end + seconds for end, seconds in zip(ends, reduce, strict=True)) + others

    def _find_most_saved(self, setup: TrainingSetup, machine: Machine) -> float:
        """The most seconds that a pair of units of any kinds saves."""
        of_all_kinds = self.setup_of(setup, tuple(range(len(self.kinds))))
        return pair_times(of_all_kinds, machine).most_saved

    def _num_units(self, order: Order) -> int:
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
