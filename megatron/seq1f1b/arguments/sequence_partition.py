"""Cuts sequences by our flags and the sizes of Megatron's run.

Tested in arguments/test_config.py by test_lengths_follow_documents_where_the_strategy_can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..files.lengths import read_segment_lengths
from ..files.typed import named_by
from ..partition import STRATEGIES, SegmentTime, Task, check_lengths, cut_sequence
from ..schedule import Costs, ScheduleChoice, auto, simulate
from .megatron_run import MegatronRun

# `auto` plans some ten thousand actions a second; fewer trials find little.
_ACTIONS_TO_PLAN = 8_000
_LEAST_TRIALS = 8
_MOST_TRIALS = 30
# With more, the pipeline is full for most of the step, so equal times are as good.
_FEW_MICROBATCHES = 2


class Predictions(Protocol):
    """The costs of the segments and steps of one run. Every method raises ValueError if they are not known."""

    @property
    def is_measured(self) -> bool:
        """Whether the times come from --sequence-split-profile."""

    @property
    def full_speed_rows(self) -> int:
        """The fewest tokens of a segment at which kernels run at full speed."""

    @property
    def flops(self) -> tuple[int, int] | None:
        """FLOPs of a token and of a pair of tokens by the formula of the authors of Seq1F1B; None for unknown sizes."""

    def time(self, of_any_length: bool = False) -> SegmentTime:
        """Seconds of a segment on the slowest stage. A trace does not have the times `of_any_length`."""

    def of_actions(self, lengths: Sequence[int]) -> Costs:
        """The costs of the actions on segments of `lengths` tokens, for plans of `auto`."""

    def least_offload(self, schedule: ScheduleChoice, lengths: Sequence[int]) -> float:
        """The least share of activations, in sixteenths, that has to move for a step to fit the device, or 1."""

    def best_num_segments(self, schedule: ScheduleChoice, cut: Callable[[int], tuple[int, ...]]) -> int:
        """The number of segments of the shortest step that fits the device; `cut(number)` gives their lengths."""


@dataclass(frozen=True)
class SequencePartition:
    """Cuts by `strategy`, which follows `costs`, unless `file` gives the lengths. `num_segments` is None if a file or
    TeraPipe's dynamic programme determines it. For few micro-batches of a `planned` schedule, `balanced` compares the
    predicted steps of several cuts."""

    run: MegatronRun
    costs: Predictions
    strategy: str
    num_segments: int | None
    file: Path | None
    planned: ScheduleChoice | None = None

    @property
    def follows_documents(self) -> bool:
        """Whether packed sequences are cut micro-batch by micro-batch, each by its own documents."""
        return self.file is None and STRATEGIES[self.strategy].follows_documents

    def cut(
        self, sequence_length: int, num_segments: int | None = None, documents: Sequence[Sequence[int]] | None = None
    ) -> tuple[int, ...]:
        """Lengths in tokens of the segments of a sequence; raises ValueError. They may follow the `documents` of a
        micro-batch, given by their start positions in each sequence."""
        run = self.run
        costs = self.costs
        num_segments = self.num_segments if num_segments is None else num_segments
        if self.file is not None:
            with named_by("--sequence-split-file"):
                lengths = read_segment_lengths(self.file)
            with named_by(f"--sequence-split-file {self.file}:"):
                check_lengths(lengths, sequence_length, num_segments, run.segment_multiple)
            return lengths
        strategy = STRATEGIES[self.strategy]
        finds_number = num_segments is None and self.strategy == "terapipe"
        has_time = strategy.needs == "time" or (strategy.needs == "measured time" and costs.is_measured)
        return cut_sequence(
            self.strategy,
            Task(
                sequence_length=sequence_length,
                num_segments=num_segments,
                multiple_of=run.segment_multiple,
                time=costs.time(finds_number) if has_time and run.has_sizes else None,
                flops=costs.flops,
                full_speed_rows=costs.full_speed_rows,
                num_stages=len(run.layers_per_stage),
                num_microbatches=run.num_microbatches,
                documents=documents,
                **self._trials(num_segments or 1),
            ),
        )

    def _trials(self, num_segments: int) -> dict[str, Any]:
        """Arguments for a search over cuts: how to time a step, and how many cuts to try; empty if it would be slow."""
        run = self.run
        planned = self.planned
        if planned is None or num_segments == 1 or run.num_microbatches > _FEW_MICROBATCHES or not run.has_sizes:
            return {}
        shape = run.shape(planned.placement, num_segments)
        trials = _ACTIONS_TO_PLAN // (3 * shape.num_units * shape.num_stages)
        if trials < _LEAST_TRIALS:
            return {}

        def seconds(lengths: tuple[int, ...]) -> float:
            costs = self.costs.of_actions(lengths)
            return simulate(auto(shape, costs, split=planned.split), costs).makespan

        return {"step": seconds, "trials": min(_MOST_TRIALS, trials)}
