"""Lower bounds of the seconds of steps of packed sequences (`packed_steps`).

Tested in planner/test_unit_search.py.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..costs.machine import Machine
from ..costs.pair_times import exchanges, pair_times
from ..costs.stage_times import rows_of_stages, step_costs, step_end
from ..costs.training_setup import TrainingSetup
from .packed_steps import MicroBatchKind, Order, PackedSteps


class MicroBatchWork(NamedTuple):
    """Seconds of a micro-batch on each stage: all of its compute, and the first forward and the last backward, which
    are of its first unit."""

    of_stages: list[float]
    first_forward: list[float]
    last_backward: list[float]


class _StepEnds(NamedTuple):
    """Seconds after the compute of a step: in which each rank sums gradients, and in which all else follows."""

    reduce: list[float]
    others: float


class PackedBounds:
    """Lower bounds of the steps of `packed` on a machine."""

    def __init__(self, packed: PackedSteps, machine: Machine) -> None:
        self._packed = packed
        self._machine = machine
        # Candidates share these.
        self.likely_slowest = lru_cache(maxsize=1024)(self._find_likely_slowest)
        self.work_of_kinds = lru_cache(maxsize=1024)(self._find_work_of_kinds)
        self._step_ends = lru_cache(maxsize=1024)(self._find_step_ends)
        self._most_saved = lru_cache(maxsize=1024)(self._find_most_saved)

    def _find_likely_slowest(self, setup: TrainingSetup) -> list[Order]:
        """The replica of each step with the most compute, if its bubble is P - 1 units."""
        seconds_of_kinds = [
            sum(work.of_stages) for work in self.work_of_kinds(setup.layer_setup, setup.layers_per_stage)
        ]
        bubble = (setup.pipeline_parallel - 1) / setup.placement.num_chunks  # in units

        def seconds(order: Order) -> float:
            compute = sum(seconds_of_kinds[kind] for kind in order)
            return compute * (1 + bubble / self._packed.num_units(order))

        return [max(step, key=seconds) for step in self._packed.steps]

    def by_compute(self, setup: TrainingSetup, order: Order) -> float:
        """A lower bound for the step of a replica from the compute of each rank, before which the ranks before it run
        the first unit, and after which they run its last backward."""
        work = self.work_of_kinds(setup.layer_setup, setup.layers_per_stage)
        of_stages = [0.0] * setup.placement.num_stages
        for kind, count in Counter(order).items():
            for stage, seconds in enumerate(work[kind].of_stages):
                of_stages[stage] += count * seconds
        hidden = 0.0
        if setup.has_pairs:
            hidden = self._most_saved(setup) * self._packed.num_units(order) * setup.placement.num_chunks
        ends = []
        around = 0.0
        for rank in range(setup.pipeline_parallel):
            ends.append(around + sum(of_stages[stage] for stage in setup.placement.stages_of(rank)) - hidden)
            around += work[order[0]].first_forward[rank]
            if not setup.splits_backward:  # weight gradients may come after the last input gradient
                around += work[order[-1]].last_backward[rank]
        return self._with_step_end(ends, setup)

    def in_time(self, setup: TrainingSetup, order: Order) -> float:
        """A lower bound for the step of a replica from compute and messages in time, as if messages shared no port."""
        of_step = self._packed.setup_of(setup, order)
        saved = pair_times(of_step, self._machine) if setup.has_pairs else None
        ends = self._packed.rank_ends(setup, order).by(step_costs(of_step, self._machine), saved)
        return self._with_step_end(ends, setup)

    def _find_work_of_kinds(
        self, layer_setup: TrainingSetup, layers_per_stage: tuple[int, ...]
    ) -> list[MicroBatchWork]:
        """The work of a micro-batch of each kind. Kinds whose units but the last are the first ones of the longest kind
        share the times of these."""
        kinds = self._packed.kinds
        parts = self._packed.parts_of(layer_setup)
        longest = max(kinds, key=lambda kind: len(kind.lengths))
        rows_of_longest = rows_of_stages(parts[kinds.index(longest)], self._machine, layers_per_stage)
        # For each stage, the seconds of the first n units of the longest kind.
        of_first_units = [[*accumulate(map(sum, zip(*rows, strict=True)), initial=0.0)] for rows in rows_of_longest]
        work = []
        for kind, part in zip(kinds, parts, strict=True):
            if _begins_like(kind, longest):
                shared = len(kind.lengths) - 1
                # The last unit, behind one segment in place of those before it.
                last = part.but(segments=(sum(kind.lengths[:-1]), kind.lengths[-1]), seen=(0.0, kind.seen[-1]))
                rows_of_last = rows_of_stages(last, self._machine, layers_per_stage)
                of_stages = [
                    seconds[shared] + f[1] + i[1] + w[1]
                    for seconds, (f, i, w) in zip(of_first_units, rows_of_last, strict=True)
                ]
                rows_of_first = rows_of_longest
            else:
                rows_of_first = rows_of_stages(part, self._machine, layers_per_stage)
                of_stages = [sum(map(sum, rows)) for rows in rows_of_first]
            work.append(
                MicroBatchWork(
                    of_stages=of_stages,
                    first_forward=[f[0] for f, _, _ in rows_of_first],
                    last_backward=[i[0] + w[0] for _, i, w in rows_of_first],
                )
            )
        return work

    def _find_step_ends(self, setup: TrainingSetup) -> _StepEnds:
        ends = [step_end(setup, self._machine, rank) for rank in range(setup.pipeline_parallel)]
        others = max(end.update for end in ends) + max(end.gather for end in ends) + self._machine.host.step
        return _StepEnds([end.reduce for end in ends], others)

    def _with_step_end(self, ends: Sequence[float], setup: TrainingSetup) -> float:
        """The seconds of a step, from the ends of the compute of its ranks."""
        after = self._step_ends(setup)
        return max(end + seconds for end, seconds in zip(ends, after.reduce, strict=True)) + after.others

    def _find_most_saved(self, setup: TrainingSetup) -> float:
        """The most seconds that a pair of units of any kinds saves."""
        of_all_kinds = self._packed.setup_of(setup, tuple(range(len(self._packed.kinds))))
        return exchanges(of_all_kinds, self._machine).most_saved


packed_bounds = lru_cache(maxsize=256)(PackedBounds)


def _begins_like(kind: MicroBatchKind, longest: MicroBatchKind) -> bool:
    """Whether a kind has several units, of which all but the last are the first ones of the longest kind."""
    shared = len(kind.lengths) - 1
    if shared == 0:
        return False
    return kind.lengths[:-1] == longest.lengths[:shared] and kind.seen[:-1] == longest.seen[:shared]
