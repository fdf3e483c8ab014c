"""Our flags and Megatron's run as one frozen value."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..partition import DEFAULT_STRATEGY
from ..planning.costs import A100, CPU_CORE, action_costs
from ..schedule import Costs, Given, Placement, Planned, ScheduleChoice, Shape, choose, read_csv
from .device import device_memory, is_on_cpu, nearest_machine
from .megatron_run import MegatronRun
from .naming import Naming
from .segment_count import best_num_segments
from .sequence_partition import SequencePartition
from .supported import Scope, first_unsupported, packs_documents, segments_are_possible


@dataclass(frozen=True)
class PipelineConfig:
    """All that runs our schedules in this process: `pipeline_config` makes it, once.

    `schedule` is None if Megatron's own is to run untouched.
    `lengths` are those of the segments, in tokens, of a sequence of `run.sequence_length` tokens.
    `takes_authors_default` if --pipe-sp-splits was given without a strategy, which means equal lengths.
    """

    run: MegatronRun
    schedule: ScheduleChoice | None
    partition: SequencePartition
    lengths: tuple[int, ...]
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]
    takes_authors_default: bool = False

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
    def places_chunks_in_a_v(self) -> bool:
        """Whether Megatron has to build V-shaped chunks instead of its looped ones."""
        return self.schedule is not None and self.schedule.placement == "v"

    @property
    def follows_documents(self) -> bool:
        """Whether our schedule keeps attention within the documents of packed sequences, whatever a batch's masks."""
        settings = self.run.settings
        return self.schedule is not None and packs_documents(settings) and segments_are_possible(settings)

    @property
    def wants_segment_attention(self) -> bool:
        """Whether a script should build the layers with our attention, also for Megatron's own schedules.

        Its kernels are several times faster than Megatron's unfused attention, which `--attention-backend local` keeps.
        Transformer Engine's attention has no kernels for a CPU.
        """
        settings = self.run.settings
        is_theirs = settings["transformer_impl"] != "local" and self.partition.throughput is not CPU_CORE
        if is_theirs or settings["attention_backend"].name == "local":
            return False
        return segments_are_possible(settings) and not packs_documents(settings)


def pipeline_config(flags: argparse.Namespace, run: MegatronRun, naming: Naming = Naming.FLAGS) -> PipelineConfig:
    """Turn our parsed flags into the configuration of this process.

    Raises ValueError for what is not supported: a sentence that names the flag, or the keyword of a program, and the
    way out.
    """
    with naming.in_errors():
        return _pipeline_config(flags, run, naming)


def _pipeline_config(flags: argparse.Namespace, run: MegatronRun, naming: Naming) -> PipelineConfig:
    partition = SequencePartition(
        run=run,
        strategy=_strategy(flags, run),
        num_segments=None if flags.sequence_splits == "auto" else flags.sequence_splits,
        file=flags.sequence_split_file,
        profile=flags.sequence_split_profile,
        throughput=CPU_CORE if is_on_cpu(flags) else A100,
        naming=naming,
    )
    schedule = _schedule(flags, run)
    if flags.pipeline_placement != "looped":
        _check_placement(flags.pipeline_placement, schedule, run)
    if schedule is not None:  # before a cut, which takes costs that an unsupported layer may not have
        _refuse_unsupported(run, schedule, flags.sequence_splits not in (None, 1) or partition.file is not None)
    if flags.sequence_splits == "auto" and partition.file is None:
        partition = replace(partition, num_segments=_best_number(flags, schedule, partition))
    lengths = (run.sequence_length,) if schedule is None else partition.cut(run.sequence_length)
    config = PipelineConfig(
        run=run,
        schedule=schedule,
        partition=partition,
        lengths=lengths,
        trace_directory=flags.pipeline_trace,
        trace_iterations=tuple(flags.pipeline_trace_iterations),
        takes_authors_default=flags.has_authors_splits and flags.sequence_split_strategy is None,
    )
    if schedule is not None:
        _check(config, flags.pipeline_placement)
    return config


def _strategy(flags: argparse.Namespace, run: MegatronRun) -> str:
    """The strategy that was given, or the default."""
    if flags.sequence_split_strategy is not None:
        return flags.sequence_split_strategy
    # A program may bring a model whose segments have no known costs.
    return "even" if flags.has_authors_splits or run.model is None else DEFAULT_STRATEGY


def _best_number(flags: argparse.Namespace, schedule: ScheduleChoice, partition: SequencePartition) -> int:
    if isinstance(schedule, Given):
        return schedule.schedule.shape.num_segments
    if partition.run.model is None:
        raise ValueError(
            "--sequence-splits auto needs the sizes of a transformer, which this model does not have; give a number"
        )
    return best_num_segments(partition, schedule, nearest_machine(flags), device_memory(flags))


def _check_placement(placement: str, schedule: ScheduleChoice | None, run: MegatronRun) -> None:
    """Raise ValueError without chunks to place, or without a schedule of ours."""
    if schedule is None:
        raise ValueError(
            f"--pipeline-placement {placement} is not for Megatron's own schedules; add --pipeline-schedule auto"
        )
    if run.num_chunks == 1:
        raise ValueError(
            f"--pipeline-placement {placement} places several model chunks on each rank, but there is one; add "
            "--num-virtual-stages-per-pipeline-rank 2"
        )


def _schedule(flags: argparse.Namespace, run: MegatronRun) -> ScheduleChoice | None:
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
    schedule = choose(name, flags.pipeline_placement)
    if isinstance(schedule, Planned) and first_unsupported(run.settings, {Scope.SPLIT_BACKWARDS}) is not None:
        schedule = replace(schedule, split=False)
    return schedule


def _check(config: PipelineConfig, placement: str) -> None:
    """Raise ValueError for what does not fit together."""
    if isinstance(config.schedule, Given):
        _check_sizes(config.schedule.schedule.shape, config, placement)
    _refuse_unsupported(config.run, config.schedule, config.num_segments > 1)


def _refuse_unsupported(run: MegatronRun, schedule: ScheduleChoice, has_segments: bool) -> None:
    scopes = {Scope.ANY_SCHEDULE}
    if has_segments:
        scopes.add(Scope.SEGMENTS)
    if schedule.splits_backwards:
        scopes.add(Scope.SPLIT_BACKWARDS)
    if schedule.placement == "v":
        scopes.add(Scope.V_CHUNKS)
    message = first_unsupported(run.settings, scopes)
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
