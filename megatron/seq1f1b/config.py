"""What our flags ask for, as one frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .costs import (
    DeviceThroughput,
    ModelShape,
    StageCost,
    action_costs,
    analytic_costs,
    authors_flops,
    bottleneck_time,
    check_profile,
    is_trace,
    read_profile,
    read_traced_costs,
)
from .partition import STRATEGIES, PartitionError, check_lengths, cut_sequence, read_lengths, terapipe
from .schedule import Costs, Schedule, read_csv


@dataclass(frozen=True)
class PipelineConfig:
    """What our flags ask for. `schedule` is None if Megatron's own schedule is to run untouched, a path to read it.
    `placement` is that of the model chunks, looped as Megatron builds them if a program does not build its own.

    Segments are multiples of `segment_multiple` tokens. `model` is None if its sizes are not known. `layers_per_stage`
    counts transformer layers in the order of depth; `split_file` takes the place of a strategy, `split_profile` that of
    `throughput`.
    """

    schedule: str | Path | None
    placement: str
    num_segments: int
    split_strategy: str
    split_file: Path | None
    split_profile: Path | None
    segment_multiple: int
    model: ModelShape | None
    layers_per_stage: tuple[int, ...]
    recomputes_layers: bool
    tensor_parallel_size: int
    num_microbatches: int
    throughput: DeviceThroughput
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]

    def read_schedule(self) -> str | Schedule | None:
        """The name of a family, or the schedule in the file; raises OSError and ValueError."""
        return read_csv(self.schedule) if isinstance(self.schedule, Path) else self.schedule

    @property
    def cuts_by_documents(self) -> bool:
        """Whether packed sequences are cut micro-batch by micro-batch, each by its own documents."""
        return self.split_file is None and STRATEGIES[self.split_strategy].follows_documents

    def cut(self, sequence_length: int, documents: Sequence[Sequence[int]] | None = None) -> tuple[int, ...]:
        """Lengths of the segments of a sequence; raises PartitionError. Can take a second for very long sequences.

        With the `documents` of a micro-batch, for each sequence the positions that they start at, the lengths may
        follow those.
        """
        if self.split_file is not None:
            lengths = read_lengths(self.split_file)
            check_lengths(lengths, self.split_file, sequence_length, self.num_segments, self.segment_multiple)
            return lengths
        strategy = STRATEGIES[self.split_strategy]
        is_measured = self.split_profile is not None
        has_time = strategy.needs_time and self.model is not None and (is_measured or strategy.needs == "time")
        return cut_sequence(
            self.split_strategy,
            sequence_length,
            self.num_segments,
            self.segment_multiple,
            time=bottleneck_time(self.costs) if has_time else None,
            flops=authors_flops(self.model) if self.model is not None else None,
            full_speed_rows=self.throughput.full_speed_rows,
            num_stages=len(self.layers_per_stage),
            num_microbatches=self.num_microbatches,
            documents=documents,
        )

    def best_num_segments(self, sequence_length: int) -> int:
        """The number of segments of the fastest split by TeraPipe's dynamic programme; raises PartitionError."""
        if self.split_profile is not None and is_trace(self.split_profile):
            raise PartitionError(
                f"--sequence-split-profile {self.split_profile} is a trace, which does not tell what shorter segments "
                "cost, so that --sequence-split-strategy terapipe cannot choose their number; give --sequence-splits"
            )
        return len(
            terapipe(
                sequence_length,
                bottleneck_time(self.costs),
                num_stages=len(self.layers_per_stage),
                multiple_of=self.segment_multiple,
                num_microbatches=self.num_microbatches,
            )
        )

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """The cost of a segment on every stage, measured if there is a profile; raises PartitionError."""
        if self.split_profile is None:
            return analytic_costs(self.model, self.layers_per_stage, self.throughput, self.recomputes_layers)
        if is_trace(self.split_profile):
            costs, _ = read_traced_costs(self.split_profile, len(self.layers_per_stage))
            return costs
        profile = read_profile(self.split_profile)
        check_profile(profile, self.split_profile, self.model, self.tensor_parallel_size)
        return profile.costs(self.layers_per_stage)

    def action_costs(self, lengths: Sequence[int]) -> Costs:
        """What `auto` plans for: the costs of actions on segments of `lengths` tokens; raises PartitionError."""
        return action_costs(self.costs, self.layers_per_stage, lengths)
