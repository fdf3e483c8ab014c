"""Our flags and Megatron's run as one frozen value."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..partition import DEFAULT_STRATEGY, Pack, packs_of_step
from ..schedule import FAMILIES, Placement, ScheduleChoice, Shape, read_csv
from .device import is_on_cpu
from .flags import AUTO
from .megatron_run import MegatronRun
from .packages import packs_documents
from .predictions import Predictions
from .sequence_partition import SequencePartition
from .supported import Use, first_unsupported, segments_are_possible, unsupported


@dataclass(frozen=True)
class PipelineConfig:
    """All that runs our schedules in this process: `pipeline_config` makes it, once.

    `schedule` is None if Megatron's own is to run untouched.
    `lengths` are those of the segments, in tokens, of a sequence of `run.sequence_length` tokens. `keeps_attention`:
    layers are recomputed all but their attention. `keeps_logits`: the loss is not computed in pieces. `offloads`: the
    share of the activations that a rank would hold which waits in the memory of its host. `partitions_state`:
    data-parallel ranks keep shares of weights and gradients. `unit_tokens`: sequences are put into units of at most so
    many tokens, and `lengths` are those of the longest that there can be.
    """

    run: MegatronRun
    schedule: ScheduleChoice | None
    partition: SequencePartition
    lengths: tuple[int, ...]
    keeps_attention: bool
    keeps_logits: bool
    offloads: float
    partitions_state: bool
    unit_tokens: int | None
    trace_directory: Path | None
    trace_iterations: tuple[int, ...]
    is_on_cpu: bool

    @property
    def num_segments(self) -> int:
        """The number of segments of every sequence."""
        return len(self.lengths)

    def cut(self, sequence_length: int, documents: Sequence[Sequence[int]] | None = None) -> tuple[int, ...]:
        """Lengths of the segments of a sequence, as `SequencePartition.cut` gives them; raises ValueError."""
        if sequence_length == self.run.sequence_length and documents is None:
            return self.lengths
        return self.partition.cut(sequence_length, self.num_segments, documents)

    def pack(self, lengths: Sequence[int], replicas: int, alike: bool) -> list[list[Pack]]:
        """The micro-batches of each replica, of sequences of `lengths` tokens in units; see `packs_of_step`."""
        assert self.unit_tokens is not None
        per_token, per_pair = self.partition.costs.flops or (1, 0)

        def work(length: int) -> float:
            return per_token * length + per_pair * length**2 / 2

        return packs_of_step(lengths, self.unit_tokens, self.run.segment_multiple, replicas, work, alike)

    @property
    def places_chunks_in_a_v(self) -> bool:
        """Whether Megatron has to build V-shaped chunks instead of its looped ones."""
        return self.schedule is not None and self.schedule.placement == "v"

    @property
    def follows_documents(self) -> bool:
        """Whether our schedule keeps attention within the documents of packed sequences, whatever a batch's masks."""
        settings = self.run.settings
        return self.schedule is not None and packs_documents(settings) and segments_are_possible(settings)

    def in_force(self) -> dict[str, Any]:
        """Resolved flags, by name, to write back to parsed arguments; empty under Megatron's own schedule."""
        if self.schedule is None:
            return {}
        found: dict[str, Any] = {"offload_activations": self.offloads}
        if self.unit_tokens is None:
            found["sequence_splits"] = self.num_segments
        if self.schedule.given is None:
            found["pipeline_schedule"] = self.schedule.name
        if self.num_segments > 1 and self.partition.file is None and self.unit_tokens is None:
            found["sequence_split_strategy"] = self.partition.strategy
        return found

    @property
    def wants_segment_attention(self) -> bool:
        """Whether a script should build the layers with our attention, also for Megatron's own schedules.

        Its kernels are several times faster than Megatron's unfused attention, which `--attention-backend local` keeps.
        Transformer Engine's attention has no kernels for a CPU.
        """
        settings = self.run.settings
        is_transformer_engines = settings["transformer_impl"] != "local" and not self.is_on_cpu
        if is_transformer_engines or settings["attention_backend"].name == "local":
            return False
        return segments_are_possible(settings) and not packs_documents(settings)


def refuse_unsupported(flags: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a feature in `settings` that does not go with our flags.

    To be called when arguments are parsed, before Megatron's own checks, whose assertions would end the program first.
    """
    schedule = _schedule(flags, settings)
    if schedule is not None:
        _refuse(settings, schedule, _asks_for_segments(flags), flags.unit_tokens is not None)


def pipeline_config(flags: argparse.Namespace, run: MegatronRun, costs: Predictions) -> PipelineConfig:
    """Turn our parsed flags into the configuration of this process; `costs` are those of the segments of `run`.

    Raises ValueError for what is not supported: a sentence that names the flag and the way out.
    """
    schedule, in_units = _schedule(flags, run.settings), flags.unit_tokens is not None
    if in_units:
        _check_units(flags, schedule, run)
    partition = SequencePartition(
        run=run,
        costs=costs,
        strategy="even" if in_units else _strategy(flags, run),
        num_segments=_number(flags, run),
        file=flags.sequence_split_file,
    )
    if flags.pipeline_placement != "looped":
        _check_placement(flags.pipeline_placement, schedule, run)
    lengths: tuple[int, ...] = (run.sequence_length,)
    if schedule is not None:
        # Before a cut, which takes costs that an unsupported layer may not have, and when their number is known.
        _refuse(run.settings, schedule, _asks_for_segments(flags), in_units)
        if flags.sequence_splits == "auto" and partition.file is None:
            partition = replace(partition, num_segments=_best_number(schedule, partition))
        if schedule.is_planned and schedule.placement == "v":
            partition = replace(partition, planned=schedule)
        lengths = partition.cut(run.sequence_length)
        _refuse(run.settings, schedule, len(lengths) > 1 or in_units, in_units)
    if flags.recompute_keeps_attention:
        _check_recomputation(schedule, run.settings)
    offloads = flags.offload_activations
    if offloads or (schedule is not None and schedule.has_moves):
        _check_offload(offloads, schedule, run)
    if offloads == AUTO and schedule is not None:
        offloads = costs.least_offload(schedule, lengths)
    if flags.partition_state:
        _refuse_megatrons_own(schedule, "--partition-state", "--pipeline-schedule breadth-first")
        if not run.settings.get("partition_state"):  # a program's
            raise ValueError(
                "--partition-state is for chunks in Megatron's DistributedDataParallel; call install before it is made"
            )
    if schedule is not None and schedule.given is not None:
        _check_sizes(schedule.given.shape, run, len(lengths), flags.pipeline_placement)
    return PipelineConfig(
        run=run,
        schedule=schedule,
        partition=partition,
        lengths=lengths,
        keeps_attention=flags.recompute_keeps_attention,
        keeps_logits=flags.keep_logits,
        offloads=offloads,
        partitions_state=flags.partition_state,
        unit_tokens=flags.unit_tokens,
        trace_directory=flags.pipeline_trace,
        trace_iterations=tuple(flags.pipeline_trace_iterations),
        is_on_cpu=is_on_cpu(flags),
    )


def _asks_for_segments(flags: argparse.Namespace) -> bool:
    given = flags.sequence_split_file, flags.unit_tokens
    return flags.sequence_splits not in (None, 1) or any(each is not None for each in given)


def _number(flags: argparse.Namespace, run: MegatronRun) -> int | None:
    """Of the segments of a sequence, as far as it is given."""
    if flags.unit_tokens is not None:
        return -(-run.sequence_length // int(flags.unit_tokens))
    given: int | None = None if flags.sequence_splits == AUTO else flags.sequence_splits
    return given


def _strategy(flags: argparse.Namespace, run: MegatronRun) -> str:
    """The strategy that was given, or the default."""
    if flags.sequence_split_strategy is not None:
        return str(flags.sequence_split_strategy)
    # A program may bring a model whose segments have no known costs.
    return DEFAULT_STRATEGY if run.has_sizes and not flags.means_equal_lengths else "even"


def _best_number(schedule: ScheduleChoice, partition: SequencePartition) -> int:
    if schedule.given is not None:
        return schedule.given.shape.num_segments
    if not partition.run.has_sizes:
        raise ValueError(
            "--sequence-splits auto needs the sizes of a transformer, which this model does not have; give a number"
        )
    length = partition.run.sequence_length
    return partition.costs.best_num_segments(schedule, lambda number: partition.cut(length, number))


def _check_units(flags: argparse.Namespace, schedule: ScheduleChoice | None, run: MegatronRun) -> None:
    """Raise ValueError for what does not go with sequences in units of equal size."""
    most = flags.unit_tokens
    others = "sequence_splits", "sequence_split_file", "sequence_split_strategy", "sequence_split_profile"
    other = next((name for name in others if getattr(flags, name) is not None), None)
    if other is not None:
        raise ValueError(f"--unit-tokens determines where sequences are cut; drop --{other.replace('_', '-')}")
    if schedule is None or not schedule.is_named:
        raise ValueError(
            "--unit-tokens gives each step other numbers of segments, for which no order is planned in time; take a "
            f"--pipeline-schedule of {', '.join(FAMILIES)}"
        )
    if most < 1 or most % run.segment_multiple:
        raise ValueError(
            f"--unit-tokens {most} is no multiple of {run.segment_multiple}, as tensor and context parallelism need it"
        )


def _check_placement(placement: str, schedule: ScheduleChoice | None, run: MegatronRun) -> None:
    """Raise ValueError without chunks to place, or without a schedule of ours."""
    _refuse_megatrons_own(schedule, f"--pipeline-placement {placement}", "--pipeline-schedule auto")
    if run.num_chunks == 1:
        raise ValueError(
            f"--pipeline-placement {placement} places several model chunks on each rank, but there is one; add "
            "--num-virtual-stages-per-pipeline-rank 2"
        )


def _check_recomputation(schedule: ScheduleChoice | None, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where nothing repeats attention that could be kept, or Megatron's own schedule runs."""
    if settings.get("recompute_granularity") != "full":
        raise ValueError(
            "--recompute-keeps-attention is for --recompute-granularity full, which alone repeats whole layers; add "
            "that, or drop it"
        )
    _refuse_megatrons_own(schedule, "--recompute-keeps-attention")
    _refuse_as_segments(settings, "--recompute-keeps-attention")


def _check_offload(share: float | str, schedule: ScheduleChoice | None, run: MegatronRun) -> None:
    """Raise ValueError where activations cannot move, or are told to by two flags."""
    _refuse_megatrons_own(schedule, "--offload-activations")
    if share and schedule is not None and schedule.has_moves:
        raise ValueError("--pipeline-schedule-file has OFFLOAD and RELOAD by itself; drop --offload-activations")
    if share == AUTO and not run.has_sizes:
        raise ValueError(
            "--offload-activations auto needs the sizes of a transformer, which this model does not have; give a "
            "fraction"
        )
    sentence = first_unsupported(run.settings, {Use.OFFLOAD})
    if sentence is not None:
        raise ValueError(sentence)


def _refuse_megatrons_own(
    schedule: ScheduleChoice | None, flag: str, added: str = "--sequence-splits or --pipeline-schedule 1f1b"
) -> None:
    if schedule is None:
        raise ValueError(f"{flag} is not for Megatron's own schedules; add {added}")


def _schedule(flags: argparse.Namespace, settings: Mapping[str, Any]) -> ScheduleChoice | None:
    if flags.pipeline_schedule_file is not None:
        try:
            return ScheduleChoice.of(read_csv(flags.pipeline_schedule_file))
        except OSError as error:
            raise ValueError(str(error)) from error
    name = flags.pipeline_schedule
    has_segments = flags.sequence_splits is not None or flags.sequence_split_file is not None
    has_segments |= flags.unit_tokens is not None
    if name is None and (has_segments or flags.sequence_split_strategy == "terapipe"):
        name = "1f1b"
    if name is None:
        return None
    split = name != "auto" or first_unsupported(settings, {Use.SPLIT_BACKWARDS}) is None
    return ScheduleChoice(name, flags.pipeline_placement, split)


def _refuse(settings: Mapping[str, Any], schedule: ScheduleChoice, has_segments: bool, in_units: bool) -> None:
    uses = {Use.ANY_SCHEDULE}
    if has_segments:
        uses.add(Use.SEGMENTS)
    if schedule.splits_backwards:
        uses.add(Use.SPLIT_BACKWARDS)
    if schedule.placement == "v":
        uses.add(Use.V_CHUNKS)
    if settings.get("partition_state"):
        uses.add(Use.PARTITIONED_STATE)
    if in_units:
        uses.add(Use.UNITS)
    sentence = first_unsupported(settings, uses)
    if sentence is not None:
        raise ValueError(sentence)
    if settings.get("keep_documents_apart"):  # a program's
        _refuse_as_segments(settings, "keep_documents_apart")


def _refuse_as_segments(settings: Mapping[str, Any], asked: str) -> None:
    """Raise ValueError for what segments do not support where whole sequences have their attention, too."""
    for row in unsupported(settings, {Use.SEGMENTS}):
        raise ValueError(f"{asked} attends as segments do, and {row.feature} {row.because}; drop one of the two")


def _check_sizes(shape: Shape, run: MegatronRun, num_segments: int, placement: str) -> None:
    """Raise ValueError if the sizes of the schedule in a file are not those of the other flags."""
    if run.settings.get("step_batch_size_schedule"):
        raise ValueError(
            "--step-batch-size-schedule changes the number of micro-batches, which --pipeline-schedule-file fixes; "
            "drop one"
        )
    stages = Placement(run.pipeline_parallel_size, run.num_chunks, placement)
    asked = Shape(stages, run.num_microbatches, num_segments)
    if shape != asked:
        raise ValueError(f"--pipeline-schedule-file is for {shape}, but the other flags are for {asked}")
