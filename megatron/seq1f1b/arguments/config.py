"""Our flags and Megatron's run as one frozen value."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..costs import A100, CPU_CORE, action_costs
from ..ranks import warn_on_rank_0
from ..schedule import Costs, Given, Placement, Planned, ScheduleChoice, Shape, choose, read_csv
from .megatron_run import MegatronRun
from .naming import Naming
from .sequence_partition import SequencePartition
from .supported import Scope, first_unsupported, packs_documents, segments_are_possible

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelineConfig:
    """All that runs our schedules in this process: `pipeline_config` makes it, once.

    `schedule` is None if Megatron's own is to run untouched.
    `lengths` are those of the segments, in tokens, of a sequence of `run.sequence_length` tokens.
    """

    run: MegatronRun
    schedule: ScheduleChoice | None
    partition: SequencePartition
    lengths: tuple[int, ...]
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        """The number of segments of every sequence."""
        return len(self.lengths)

    def cut(self, sequence_length: int, documents: Sequence[Sequence[int]] | None = None) -> tuple[int, ...]:
        """Lengths of the segments of a sequence, as `SequencePartition.cut` gives them; raises ValueError."""
        if sequence_length == self.run.sequence_length and documents is None:
            return self.lengths
        return self.partition.cut(sequence_length, self.num_segments, documents)

    def action_costs(self, lengths: Sequence[int]) -> Costs:
        """What `auto` plans for: the costs of actions on segments of `lengths` tokens; raises ValueError."""
        return action_costs(self.partition.costs, self.run.layers_per_stage, lengths)

    @property
    def follows_documents(self) -> bool:
        """Whether our schedule keeps attention within the documents of packed sequences, whatever a batch's masks."""
        settings = self.run.settings
        return self.schedule is not None and packs_documents(settings) and segments_are_possible(settings)

    @property
    def wants_segment_attention(self) -> bool:
        """Whether a script should build local layers with our attention, also for Megatron's own schedules.

        Its kernels are several times faster than Megatron's unfused attention, which `--attention-backend local` keeps.
        """
        settings = self.run.settings
        is_local = settings["transformer_impl"] == "local" and settings["attention_backend"].name != "local"
        return is_local and segments_are_possible(settings) and not packs_documents(settings)


def pipeline_config(
    flags: argparse.Namespace, run: MegatronRun, placement: str = "looped", naming: Naming = Naming.FLAGS
) -> PipelineConfig:
    """Turn our parsed flags into the configuration of this process.

    Raises ValueError for what is not supported: a sentence that names the flag, or the keyword of a program, and the
    way out.
    """
    with naming.in_errors():
        return _pipeline_config(flags, run, placement, naming)


def _pipeline_config(flags: argparse.Namespace, run: MegatronRun, placement: str, naming: Naming) -> PipelineConfig:
    is_on_cpu = _is_on_cpu(flags.device)
    partition = SequencePartition(
        run=run,
        strategy=flags.sequence_split_strategy,
        num_segments=flags.sequence_splits,
        file=flags.sequence_split_file,
        profile=flags.sequence_split_profile,
        throughput=CPU_CORE if is_on_cpu else A100,
        naming=naming,
    )
    schedule = _schedule(flags, run, placement)
    lengths = (run.sequence_length,) if schedule is None else partition.cut(run.sequence_length)
    config = PipelineConfig(
        run=run,
        schedule=schedule,
        partition=partition,
        lengths=lengths,
        trace_directory=flags.pipeline_trace,
        trace_iterations=tuple(flags.pipeline_trace_iterations),
    )
    if schedule is not None:
        _check(config, placement)
    return config


def _schedule(flags: argparse.Namespace, run: MegatronRun, placement: str) -> ScheduleChoice | None:
    if flags.pipeline_schedule_file is not None:
        try:
            return Given(read_csv(flags.pipeline_schedule_file))
        except OSError as error:
            raise ValueError(str(error)) from error
    name = flags.pipeline_schedule
    has_segments = flags.sequence_splits is not None or flags.sequence_split_file is not None
    if name is None and (has_segments or flags.sequence_split_strategy == "terapipe"):
        name = "1f1b"
    if name is None:
        return None
    schedule = choose(name, placement)
    if isinstance(schedule, Planned):
        obstacle = first_unsupported(run.settings, {Scope.SPLIT_BACKWARDS})
        if obstacle is not None:
            schedule = replace(schedule, split=False)
            warn_on_rank_0(_log, f"--pipeline-schedule auto plans without splitting backwards: {obstacle}.")
    return schedule


def _check(config: PipelineConfig, placement: str) -> None:
    """Raise ValueError for what does not fit together."""
    if isinstance(config.schedule, Given):
        _check_sizes(config.schedule.schedule.shape, config, placement)
    scopes = {Scope.ANY_SCHEDULE}
    if config.num_segments > 1:
        scopes.add(Scope.SEGMENTS)
    if config.schedule.splits_backwards:
        scopes.add(Scope.SPLIT_BACKWARDS)
    message = first_unsupported(config.run.settings, scopes)
    if message is not None:
        raise ValueError(message)


def _check_sizes(shape: Shape, config: PipelineConfig, placement: str) -> None:
    """Raise ValueError if the sizes of the schedule in a file are not those of the other flags."""
    run = config.run
    if run.settings.get("step_batch_size_schedule"):
        raise ValueError(
            "--step-batch-size-schedule changes the number of micro-batches, which --pipeline-schedule-file fixes; "
            "drop one"
        )
    stages = Placement(run.pipeline_parallel_size, run.num_chunks, placement)
    asked = Shape(stages, run.num_microbatches, config.num_segments)
    if shape != asked:
        raise ValueError(
            f"--pipeline-schedule-file is for {_words(shape)}, but the other flags are for {_words(asked)}"
        )


def _words(shape: Shape) -> str:
    return (
        f"{shape.num_ranks} ranks with {shape.num_chunks} model chunks each ({shape.placement.style}), "
        f"{shape.num_microbatches} micro-batches and {shape.num_segments} segments"
    )


def _is_on_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or device == "auto" and not torch.cuda.is_available()
