"""Where sequences are cut, as our flags and the sizes of Megatron's run have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..partition import STRATEGIES, Task, check_lengths, cut_sequence, read_lengths, terapipe
from .megatron_run import MegatronRun
from .predictions import Predictions


@dataclass(frozen=True)
class SequencePartition:
    """A cut by `strategy`, which follows `costs`, unless `file` gives the lengths.

    `num_segments` is None where no number is given: a file determines it, or TeraPipe's dynamic programme finds it.
    """

    run: MegatronRun
    costs: Predictions
    strategy: str
    num_segments: int | None
    file: Path | None

    @property
    def follows_documents(self) -> bool:
        """Whether packed sequences are cut micro-batch by micro-batch, each by its own documents."""
        return self.file is None and STRATEGIES[self.strategy].follows_documents

    @property
    def uses_profile(self) -> bool:
        """Whether measured times determine where sequences are cut."""
        return self.file is None and STRATEGIES[self.strategy].needs_time

    def cut(
        self, sequence_length: int, num_segments: int | None = None, documents: Sequence[Sequence[int]] | None = None
    ) -> tuple[int, ...]:
        """Lengths in tokens of the segments of a sequence; raises ValueError. Can take a second for long sequences.

        With the `documents` of a micro-batch, for each sequence the positions that they start at, the lengths may
        follow those.
        """
        run, costs = self.run, self.costs
        num_segments = self.num_segments if num_segments is None else num_segments
        if self.file is not None:
            lengths = read_lengths(self.file)
            check_lengths(lengths, self.file, sequence_length, num_segments, run.segment_multiple)
            return lengths
        if num_segments is None and self.strategy == "terapipe" and run.has_sizes:
            return terapipe(
                sequence_length,
                costs.time(of_any_length=True),
                num_stages=len(run.layers_per_stage),
                multiple_of=run.segment_multiple,
                num_microbatches=run.num_microbatches,
            )
        strategy = STRATEGIES[self.strategy]
        has_time = strategy.needs == "time" or strategy.needs == "measured time" and costs.is_measured
        return cut_sequence(
            self.strategy,
            Task(
                sequence_length,
                1 if num_segments is None else num_segments,
                run.segment_multiple,
                time=costs.time() if has_time and run.has_sizes else None,
                flops=costs.flops,
                full_speed_rows=costs.full_speed_rows,
                num_stages=len(run.layers_per_stage),
                num_microbatches=run.num_microbatches,
                documents=documents,
            ),
        )
