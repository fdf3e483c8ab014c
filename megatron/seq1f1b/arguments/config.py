"""Our flags and Megatron's run as one frozen value."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..partition import DEFAULT_STRATEGY, Pack, packs_of_step, work_by_flops
from ..schedule import FAMILIES, ScheduleChoice, Shape, read_csv
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

    `schedule` is None if Megatron's own is to run untouched. `lengths` are those of the segments, in tokens, of a
    sequence of `run.sequence_length` tokens. `keeps_attention`: layers are recomputed all but their attention.
    `keeps_logits`: the loss is not computed in pieces. `offloads`: the share of a rank's activations that waits in the
    memory of its host. `partitions_state`: data-parallel ranks keep shares of weights and gradients. `unit_tokens`:
    sequences are put into units of at most so many tokens; `lengths` are then those of the longest possible one.
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
        work = work_by_flops(*self.partition.costs.flops or (1, 0))
        return packs_of_step(lengths, self.unit_tokens, self.run.segment_multiple, replicas, work, alike)

    @property
    def moves_activations(self) -> bool:
        """Whether activations go to the memory of the host, as the flags or a schedule from a file have it."""
        return self.offloads > 0 or (self.schedule is not None and self.schedule.has_moves)

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
        _refuse(settings, _uses(flags, schedule, settings))


def pipeline_config(flags: argparse.Namespace, run: MegatronRun, costs: Predictions) -> PipelineConfig:
    """Turn our parsed flags into the configuration of this process; `costs` are those of the segments of `run`.

    Raises ValueError for what is not supported: a sentence that names the flag and the way out.
    """
    schedule, settings = _schedule(flags, run.settings), run.settings
    offloads = flags.offload_activations
    lengths: tuple[int, ...] = (run.sequence_length,)
    partition = _partition(flags, run, costs)
    if schedule is None:
        _refuse_without_schedule(flags, settings)
    else:
        # Before a cut: an unsupported layer may have no known costs.
        _refuse(settings, _uses(flags, schedule, settings))
        _check(flags, schedule, run)
        if flags.sequence_splits == AUTO and partition.file is None:
            partition = replace(partition, num_segments=_best_number(schedule, partition))
        if schedule.is_planned and schedule.placement == "v":
            partition = replace(partition, planned=schedule)
        lengths = partition.cut(run.sequence_length)
        if len(lengths) > 1:
            _refuse(settings, {Use.SEGMENTS})
        if settings.get("tp_comm_overlap") and len(set(lengths)) > 1:
            raise ValueError(
                f"--tp-comm-overlap has buffers for segments of one length, and {list(lengths)} differ; take "
                "--sequence-split-strategy even and a --sequence-splits that divides, or drop it"
            )
        if offloads or schedule.has_moves:
            _refuse(settings, {Use.OFFLOAD})
        if offloads == AUTO:
            offloads = costs.least_offload(schedule, lengths)
        if schedule.given is not None:
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


def _schedule(flags: argparse.Namespace, settings: Mapping[str, Any]) -> ScheduleChoice | None:
    if flags.pipeline_schedule_file is not None:
        return ScheduleChoice.of(read_csv(flags.pipeline_schedule_file))
    name = flags.pipeline_schedule
    if name is None:
        asked = flags.sequence_splits, flags.sequence_split_file, flags.unit_tokens
        if all(each is None for each in asked) and flags.sequence_split_strategy != "terapipe":
            return None
        name = "1f1b"
    split = name != "auto" or first_unsupported(settings, {Use.SPLIT_BACKWARDS}) is None
    return ScheduleChoice(name, flags.pipeline_placement, split)


def _uses(flags: argparse.Namespace, schedule: ScheduleChoice, settings: Mapping[str, Any]) -> set[Use]:
    """What the flags ask for, as far as it is known before a cut."""
    in_units = flags.unit_tokens is not None
    has_segments = flags.sequence_splits not in (None, 1) or flags.sequence_split_file is not None or in_units
    asked = {
        Use.ANY_SCHEDULE: True,
        Use.SEGMENTS: has_segments,
        Use.SPLIT_BACKWARDS: schedule.splits_backwards,
        Use.V_CHUNKS: schedule.placement == "v",
        Use.PARTITIONED_STATE: settings.get("partition_state"),
        Use.UNITS: in_units,
    }
    return {use for use, is_asked in asked.items() if is_asked}


def _refuse(settings: Mapping[str, Any], uses: set[Use]) -> None:
    sentence = first_unsupported(settings, uses)
    if sentence is not None:
        raise ValueError(sentence)


def _refuse_as_segments(settings: Mapping[str, Any], flag: str) -> None:
    """Raise ValueError for what segments do not support, where `flag` gives whole sequences their attention, too."""
    for row in unsupported(settings, {Use.SEGMENTS}):
        raise ValueError(f"{flag} attends as segments do, and {row.feature} {row.because}; drop one of the two")


def _refuse_without_schedule(flags: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a flag that Megatron's own schedules do not follow."""
    placement, ours = flags.pipeline_placement, "--sequence-splits or --pipeline-schedule 1f1b"
    for is_given, flag, added in (
        (placement != "looped", f"--pipeline-placement {placement}", "--pipeline-schedule auto"),
        (flags.recompute_keeps_attention, "--recompute-keeps-attention", ours),
        (flags.offload_activations, "--offload-activations", ours),
        (flags.partition_state, "--partition-state", "--pipeline-schedule breadth-first"),
    ):
        if is_given:
            raise ValueError(f"{flag} is not for Megatron's own schedules; add {added}")
    if flags.pipeline_trace is not None and settings.get("overlap_moe_expert_parallel_comm"):
        raise ValueError(
            "--pipeline-trace times forwards and backwards, and --overlap-moe-expert-parallel-comm runs them at once; "
            "drop one of the two"
        )


def _check(flags: argparse.Namespace, schedule: ScheduleChoice, run: MegatronRun) -> None:
    """Raise ValueError for flags that do not go with one another or with the run."""
    settings, offloads = run.settings, flags.offload_activations
    if settings.get("keep_documents_apart"):  # a program's
        _refuse_as_segments(settings, "keep_documents_apart")
    if flags.unit_tokens is not None:
        _check_units(flags, schedule, run)
    if flags.pipeline_placement != "looped" and run.num_chunks == 1:
        raise ValueError(
            f"--pipeline-placement {flags.pipeline_placement} places several model chunks on each rank, but there is "
            "one; add --num-virtual-stages-per-pipeline-rank 2"
        )
    if flags.recompute_keeps_attention:
        if settings.get("recompute_granularity") != "full":
            raise ValueError(
                "--recompute-keeps-attention is for --recompute-granularity full, which alone repeats whole layers; "
                "add that, or drop it"
            )
        _refuse_as_segments(settings, "--recompute-keeps-attention")
    if offloads and schedule.has_moves:
        raise ValueError("--pipeline-schedule-file has OFFLOAD and RELOAD by itself; drop --offload-activations")
    for flag, value in (("--offload-activations", offloads), ("--sequence-splits", flags.sequence_splits)):
        if value == AUTO and not run.has_sizes:
            raise ValueError(
                f"{flag} auto needs the sizes of a transformer, which this model does not have; give a number"
            )
    if flags.partition_state and not settings.get("partition_state"):  # a program's
        raise ValueError(
            "--partition-state is for chunks in Megatron's DistributedDataParallel; call install before it is made"
        )


def _check_units(flags: argparse.Namespace, schedule: ScheduleChoice, run: MegatronRun) -> None:
    """Raise ValueError for what does not go with sequences in units of equal size."""
    others = "sequence_splits", "sequence_split_file", "sequence_split_strategy", "sequence_split_profile"
    for name in others:
        if getattr(flags, name) is not None:
            raise ValueError(f"--unit-tokens determines where sequences are cut; drop --{name.replace('_', '-')}")
    if run.settings.get("tp_comm_overlap"):
        raise ValueError(
            "--unit-tokens makes units of unequal length, and --tp-comm-overlap has buffers of one; drop one"
        )
    if not schedule.is_named:
        raise ValueError(
            "--unit-tokens gives each step other numbers of segments, for which no order is planned in time; take a "
            f"--pipeline-schedule of {', '.join(FAMILIES)}"
        )
    if flags.unit_tokens < 1 or flags.unit_tokens % run.segment_multiple:
        raise ValueError(
            f"--unit-tokens {flags.unit_tokens} is no multiple of {run.segment_multiple}, as tensor and context "
            "parallelism need it"
        )


def _check_sizes(shape: Shape, run: MegatronRun, num_segments: int, placement: str) -> None:
    """Raise ValueError if the sizes of the schedule in a file are not those of the other flags."""
    if run.settings.get("step_batch_size_schedule"):
        raise ValueError(
            "--step-batch-size-schedule changes the number of micro-batches, which --pipeline-schedule-file fixes; "
            "drop one"
        )
    asked = run.shape(placement, num_segments)
    if shape != asked:
        raise ValueError(f"--pipeline-schedule-file is for {shape}, but the other flags are for {asked}")


def _partition(flags: argparse.Namespace, run: MegatronRun, costs: Predictions) -> SequencePartition:
    """How the flags cut sequences; without a number of segments as far as that has to be found."""
    strategy = flags.sequence_split_strategy
    num_segments = None if flags.sequence_splits == AUTO else flags.sequence_splits
    if flags.unit_tokens is not None:
        strategy, num_segments = "even", -(-run.sequence_length // flags.unit_tokens)
    elif strategy is None:
        # A program may bring a model whose segments have no known costs.
        wants_equal = flags.means_equal_lengths or run.settings.get("tp_comm_overlap")
        strategy = DEFAULT_STRATEGY if run.has_sizes and not wants_equal else "even"
    return SequencePartition(run, costs, strategy, num_segments, flags.sequence_split_file)


def _best_number(schedule: ScheduleChoice, partition: SequencePartition) -> int:
    if schedule.given is not None:
        return schedule.given.shape.num_segments
    length = partition.run.sequence_length
    return partition.costs.best_num_segments(schedule, lambda number: partition.cut(length, number))
