"""Our flags and Megatron's run as one frozen value."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..files.schedule_file import read_schedule
from ..files.typed import named_by
from ..partition import DEFAULT_STRATEGY, Pack, packs_of_step, work_by_flops
from ..schedule import CostsOfLengths, ScheduleChoice
from .flags import AUTO
from .megatron_run import MegatronRun, is_on_cpu
from .sequence_partition import Predictions, SequencePartition
from .unsupported import OurFeature, first_unsupported, packs_documents, unsupported


@dataclass(frozen=True)
class PipelineConfig:
    """All settings of our schedules in this process; `pipeline_config` makes them once.

    `flags` are ours, as given. `schedule` is None if Megatron's own is to run. `lengths` are the tokens of each segment
    of a sequence of `run.sequence_length` tokens, with `--unit-tokens` the longest possible. `offloads` is the share of
    a rank's activations that moves to host memory.
    """

    run: MegatronRun
    flags: argparse.Namespace
    schedule: ScheduleChoice | None
    partition: SequencePartition
    lengths: tuple[int, ...]
    offloads: float

    @property
    def num_segments(self) -> int:
        """The number of segments of a sequence of `run.sequence_length` tokens."""
        return len(self.lengths)

    @property
    def is_v(self) -> bool:
        """Whether the model chunks of our schedule are placed in a V."""
        return self.schedule is not None and self.schedule.placement == "v"

    @property
    def costs_of_actions(self) -> CostsOfLengths | None:
        """The costs that `auto` plans for; None if the sizes of the model are not known."""
        return self.partition.costs.of_actions if self.run.has_sizes else None

    def cut(
        self,
        sequence_length: int,
        documents: Sequence[Sequence[int]] | None = None,
        num_segments: int | None = None,
    ) -> tuple[int, ...]:
        """Lengths of the segments of a sequence, as `SequencePartition.cut` gives them; raises ValueError."""
        num_segments = num_segments or self.num_segments
        if (sequence_length, num_segments) == (self.run.sequence_length, self.num_segments) and documents is None:
            return self.lengths
        return self.partition.cut(sequence_length, num_segments, documents)

    def segments_for(self, longest: int, shortest: int) -> int:
        """The number of segments of sequences that are cut alike: as many as `--segment-tokens` asks for the longest,
        or as usual, if the shortest has so many pieces that may be segments."""
        number = self.num_segments
        if self.flags.segment_tokens is not None:
            number = ceil(longest / self.flags.segment_tokens)
        return max(1, min(number, shortest // self.run.segment_multiple))

    def pack(self, lengths: Sequence[int], replicas: int, equal_counts: bool) -> list[list[Pack]]:
        """The micro-batches of each replica, of sequences of `lengths` tokens in units; see `packs_of_step`."""
        work = work_by_flops(*self.partition.costs.flops or (1, 0))
        return packs_of_step(lengths, self.flags.unit_tokens, self.run.segment_multiple, replicas, work, equal_counts)

    @property
    def follows_documents(self) -> bool:
        """Whether our schedule keeps attention within the documents of packed sequences, whatever a batch's masks."""
        return self.schedule is not None and packs_documents(self.run.settings) and self._segments_are_possible

    def in_force(self) -> dict[str, Any]:
        """Resolved flags, by name, to write back to parsed arguments; empty under Megatron's own schedule."""
        if self.schedule is None:
            return {}
        resolved: dict[str, Any] = {"offload_activations": self.offloads}
        if self.schedule.given is None:
            resolved["pipeline_schedule"] = self.schedule.name
        if self.flags.unit_tokens is None and self.flags.segment_tokens is None:
            resolved["sequence_splits"] = self.num_segments
            if self.num_segments > 1 and self.partition.file is None:
                resolved["sequence_split_strategy"] = self.partition.strategy
        if self.schedule.pairs:
            # Megatron's configuration of a model demands 16 bits, and several chunks in a pipeline, for its own order.
            resolved["overlap_moe_expert_parallel_comm"] = False
        return resolved

    @property
    def wants_segment_attention(self) -> bool:
        """Whether layers should have our attention even under Megatron's own schedules, because its local one is
        several times slower, and Transformer Engine's needs a GPU."""
        settings = self.run.settings
        is_transformer_engines = settings["transformer_impl"] != "local" and not is_on_cpu(self.flags)
        if is_transformer_engines or settings["attention_backend"].name == "local":
            return False
        return self._segments_are_possible and not packs_documents(settings)

    @property
    def _segments_are_possible(self) -> bool:
        return not any(unsupported(self.run.settings, {OurFeature.SEGMENTS}))


def refuse_unsupported(flags: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a feature in `settings` that conflicts with our flags. Call this before Megatron's own
    checks, whose assertions would end the program first."""
    _refuse(settings, _uses(flags, _schedule(flags, settings), settings))


def pipeline_config(flags: argparse.Namespace, run: MegatronRun, costs: Predictions) -> PipelineConfig:
    """The configuration of our parsed flags; `costs` predict the segments of `run`. Raises ValueError for unsupported
    features, with a sentence that names the flag and the way out."""
    settings = vars(flags) | dict(run.settings)
    schedule = _schedule(flags, settings)
    offloads = flags.offload_activations
    lengths: tuple[int, ...] = (run.sequence_length,)
    partition = _partition(flags, run, costs)
    # Before a cut: an unsupported layer may have no known costs.
    _refuse(settings, _uses(flags, schedule, settings))
    if schedule is not None:
        _check_combinations(flags, schedule, run)
        if flags.sequence_splits == AUTO and partition.file is None:
            partition = replace(partition, num_segments=_best_num_segments(schedule, partition))
        if schedule.is_auto and schedule.placement == "v":
            partition = replace(partition, planned=schedule)
        lengths = partition.cut(run.sequence_length)
        if len(lengths) > 1:
            _refuse(settings, {OurFeature.SEGMENTS})
        if settings.get("tp_comm_overlap") and len(set(lengths)) > 1:
            raise ValueError(
                f"--tp-comm-overlap has buffers for segments of one length, and {list(lengths)} differ; take "
                "--sequence-split-strategy even and a --sequence-splits that divides, or drop it"
            )
        if offloads == AUTO:
            offloads = costs.least_offload(schedule, lengths)
        shape = run.shape(flags.pipeline_placement, len(lengths))
        if schedule.given is not None and schedule.given.shape != shape:
            raise ValueError(
                f"--pipeline-schedule-file is for {schedule.given.shape}, but the other flags are for {shape}"
            )
    return PipelineConfig(
        run=run,
        flags=flags,
        schedule=schedule,
        partition=partition,
        lengths=lengths,
        offloads=offloads,
    )


def _best_num_segments(schedule: ScheduleChoice, partition: SequencePartition) -> int:
    """The number of segments for `--sequence-splits auto`: that of a given schedule, else the one with the shortest
    predicted step."""
    if schedule.given is not None:
        return schedule.given.shape.num_segments
    length = partition.run.sequence_length
    return partition.costs.best_num_segments(schedule, lambda number: partition.cut(length, number))


def _schedule(flags: argparse.Namespace, settings: Mapping[str, Any]) -> ScheduleChoice | None:
    if flags.pipeline_schedule_file is not None:
        with named_by("--pipeline-schedule-file"):
            return ScheduleChoice.of(read_schedule(flags.pipeline_schedule_file))
    name = flags.pipeline_schedule
    if name is None:
        cuts = (flags.sequence_splits, flags.sequence_split_file, flags.unit_tokens, flags.segment_tokens)
        chooses_number = flags.sequence_split_strategy == "terapipe"  # of segments, by itself
        if all(cut is None for cut in cuts) and not chooses_number:
            return None
        name = "1f1b"
    # A family splits backwards or not; `auto` splits them where that is supported.
    split = name != "auto" or first_unsupported(settings, {OurFeature.SPLIT_BACKWARDS}) is None
    pairs = bool(settings.get("overlap_moe_expert_parallel_comm"))
    return ScheduleChoice(name, flags.pipeline_placement, split, pairs)


def _uses(flags: argparse.Namespace, schedule: ScheduleChoice | None, settings: Mapping[str, Any]) -> set[OurFeature]:
    """Our features that the flags select, as far as they are known before sequences are cut."""
    if schedule is None:
        return {OurFeature.EVERY_RUN, OurFeature.MEGATRONS_OWN}
    in_units = flags.unit_tokens is not None
    by_tokens = flags.segment_tokens is not None
    has_number = flags.sequence_splits not in (None, 1)
    selected = {
        OurFeature.EVERY_RUN: True,
        OurFeature.ANY_SCHEDULE: True,
        OurFeature.SEGMENTS: has_number or flags.sequence_split_file is not None or in_units or by_tokens,
        OurFeature.SPLIT_BACKWARDS: schedule.splits_backwards,
        OurFeature.V_CHUNKS: schedule.placement == "v",
        OurFeature.OFFLOAD: flags.offload_activations or schedule.has_moves,
        OurFeature.PARTITIONED_STATE: settings.get("partition_state"),
        OurFeature.PAIRS: schedule.pairs,
        OurFeature.SEGMENTS_OF_TOKENS: by_tokens,
        OurFeature.UNITS: in_units,
    }
    return {use for use, is_selected in selected.items() if is_selected}


def _refuse(settings: Mapping[str, Any], uses: set[OurFeature]) -> None:
    sentence = first_unsupported(settings, uses)
    if sentence is not None:
        raise ValueError(sentence)


def _check_combinations(flags: argparse.Namespace, schedule: ScheduleChoice, run: MegatronRun) -> None:
    """Raise ValueError for flags that do not go together, or not with this schedule and this run."""
    _check_attention(flags, run)
    for flag, tokens in (("--unit-tokens", flags.unit_tokens), ("--segment-tokens", flags.segment_tokens)):
        if tokens is not None and tokens % run.segment_multiple:
            raise ValueError(
                f"{flag} {tokens} is no multiple of {run.segment_multiple}, as tensor and context parallelism need it"
            )
    if flags.pipeline_placement != "looped" and run.num_chunks == 1:
        raise ValueError(
            f"--pipeline-placement {flags.pipeline_placement} places several model chunks on each rank, but there is "
            "one; add --num-virtual-stages-per-pipeline-rank 2"
        )
    if run.settings.get("overlap_moe_expert_parallel_comm") and not schedule.pairs:
        raise ValueError(
            "--pipeline-schedule-file has no pairs such as 2F3.1|2B1.0, which --overlap-moe-expert-parallel-comm asks "
            "for; write some, or drop the flag"
        )
    if flags.offload_activations and schedule.has_moves:
        raise ValueError("--pipeline-schedule-file has OFFLOAD and RELOAD by itself; drop --offload-activations")
    if flags.offload_layers_leaving and not (flags.offload_activations or schedule.has_moves):
        raise ValueError("--offload-layers-leaving is for activations that move; add --offload-activations 1")
    if flags.partition_state and not run.settings.get("partition_state"):  # a program's
        raise ValueError(
            "--partition-state is for chunks in Megatron's DistributedDataParallel; call install before it is made"
        )


def _check_attention(flags: argparse.Namespace, run: MegatronRun) -> None:
    """Raise ValueError for a flag that needs the attention of segments, even for whole sequences, in a run whose
    attention cannot be that."""
    if run.settings.get("keep_documents_apart"):
        needing = "keep_documents_apart"
    elif flags.recompute_keeps_attention:
        needing = "--recompute-keeps-attention"
    else:
        return
    obstacle = next(unsupported(run.settings, {OurFeature.SEGMENTS}), None)
    if obstacle is not None:
        raise ValueError(
            f"{needing} attends as segments do, and {obstacle.feature} {obstacle.because}; drop one of the two"
        )


def _partition(flags: argparse.Namespace, run: MegatronRun, costs: Predictions) -> SequencePartition:
    """The partition that the flags select. Its number of segments is None if that is still to be chosen."""
    strategy = flags.sequence_split_strategy
    num_segments = None if flags.sequence_splits == AUTO else flags.sequence_splits
    most_tokens = flags.unit_tokens or flags.segment_tokens
    if most_tokens is not None:
        strategy = "even"
        num_segments = ceil(run.sequence_length / most_tokens)
    elif strategy is None:
        # A program may bring a model whose segments have no known costs.
        wants_equal = flags.means_equal_lengths or run.settings.get("tp_comm_overlap")
        strategy = DEFAULT_STRATEGY if run.has_sizes and not wants_equal else "even"
    return SequencePartition(
        run=run,
        costs=costs,
        strategy=strategy,
        num_segments=num_segments,
        file=flags.sequence_split_file,
    )
