"""Where sequences are cut, as our flags and the sizes of Megatron's run have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import ParameterError
from ..partition import STRATEGIES, check_lengths, cut_sequence, read_lengths, terapipe
from ..planning.costs import (
    DeviceThroughput,
    StageCost,
    analytic_costs,
    authors_flops,
    bottleneck_time,
    check_profile,
    is_trace,
    read_profile,
    read_traced_costs,
)
from .megatron_run import MegatronRun
from .naming import Naming


@dataclass(frozen=True)
class SequencePartition:
    """A cut by `strategy`, unless `file` gives the lengths; by the times of `throughput`, unless `profile` measured
    them.

    `num_segments` is None where no number is given: a file determines it, or TeraPipe's dynamic programme finds it.
    Errors are ValueErrors that name parameters by `naming`.
    """

    run: MegatronRun
    strategy: str
    num_segments: int | None
    file: Path | None
    profile: Path | None
    throughput: DeviceThroughput
    naming: Naming = Naming.FLAGS

    @property
    def follows_documents(self) -> bool:
        """Whether packed sequences are cut micro-batch by micro-batch, each by its own documents."""
        return self.file is None and STRATEGIES[self.strategy].follows_documents

    @property
    def uses_profile(self) -> bool:
        """Whether `profile` determines where sequences are cut."""
        return self.file is None and STRATEGIES[self.strategy].needs_time

    def cut(
        self, sequence_length: int, num_segments: int | None = None, documents: Sequence[Sequence[int]] | None = None
    ) -> tuple[int, ...]:
        """Lengths in tokens of the segments of a sequence; raises ValueError. Can take a second for long sequences.

        With the `documents` of a micro-batch, for each sequence the positions that they start at, the lengths may
        follow those.
        """
        with self.naming.in_errors():
            return self._cut(sequence_length, num_segments, documents)

    def _cut(
        self, sequence_length: int, num_segments: int | None, documents: Sequence[Sequence[int]] | None
    ) -> tuple[int, ...]:
        num_segments = self.num_segments if num_segments is None else num_segments
        if self.file is not None:
            lengths = read_lengths(self.file)
            check_lengths(lengths, self.file, sequence_length, num_segments, self.run.segment_multiple)
            return lengths
        if num_segments is None and self.strategy == "terapipe" and self.run.model is not None:
            return self._fastest(sequence_length)
        strategy, run = STRATEGIES[self.strategy], self.run
        has_time = strategy.needs == "time" or strategy.needs == "measured time" and self.profile is not None
        return cut_sequence(
            self.strategy,
            sequence_length,
            1 if num_segments is None else num_segments,
            run.segment_multiple,
            time=bottleneck_time(self.costs) if has_time and run.model is not None else None,
            flops=None if run.model is None else authors_flops(run.model),
            full_speed_rows=self.throughput.full_speed_rows,
            num_stages=len(run.layers_per_stage),
            num_microbatches=run.num_microbatches,
            documents=documents,
        )

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """What a segment of a micro-batch costs on every stage; measured with a profile. Raises ValueError."""
        with self.naming.in_errors():
            return self._costs()

    def _costs(self) -> tuple[StageCost, ...]:
        run = self.run
        if self.profile is None:
            # A tensor-parallel group shares the work, the sequences of a micro-batch add to it.
            group = self.throughput.times(run.tensor_parallel_size / run.micro_batch_size)
            return analytic_costs(run.model, run.layers_per_stage, group, run.recomputes_layers)
        if is_trace(self.profile):
            costs, _ = read_traced_costs(self.profile, len(run.layers_per_stage))
            return costs
        profile = read_profile(self.profile)
        check_profile(profile, self.profile, run.model, run.tensor_parallel_size)
        return profile.costs(run.layers_per_stage)

    def _fastest(self, sequence_length: int) -> tuple[int, ...]:
        """The fastest of all cuts by TeraPipe's dynamic programme, of any number of segments."""
        if self.profile is not None and is_trace(self.profile):
            raise ParameterError(
                "{profile} is a trace, which has no times of shorter segments, so {strategy:terapipe} cannot choose "
                "their number; give {num_segments.name}",
                profile=self.profile,
            )
        return terapipe(
            sequence_length,
            bottleneck_time(self.costs),
            num_stages=len(self.run.layers_per_stage),
            multiple_of=self.run.segment_multiple,
            num_microbatches=self.run.num_microbatches,
        )
