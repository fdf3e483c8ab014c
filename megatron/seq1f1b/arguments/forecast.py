"""A step of a run before it starts: its time, its bubble, and the memory of a rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..planning.costs import action_costs
from ..planning.costs.layer_bytes import are_known
from ..planning.costs.machine import Machine
from ..planning.costs.stage_times import step_costs
from ..planning.costs.step_memory import activation_tables, rank_memory
from ..planning.costs.training_setup import TrainingSetup
from ..planning.simulator import estimate_step
from ..schedule import Given, Named, Placement, Planned, Schedule, ScheduleChoice, Shape, peak_memory
from .megatron_run import MegatronRun
from .sequence_partition import SequencePartition

MEGATRONS_OWN = Named("1f1b")


@dataclass(frozen=True)
class Forecast:
    """`seconds` are those of the pipeline's compute; `activations` is the peak of the rank that holds most.

    It is in bytes if `has_bytes`, and in tokens times layers where the formulas do not cover the model: experts, latent
    attention. Then `total_bytes`, the memory of the fullest rank, is None.
    """

    seconds: float
    bubble: float
    activations: float
    total_bytes: float | None

    @property
    def has_bytes(self) -> bool:
        """Whether `activations` is in bytes."""
        return self.total_bytes is not None


def forecast(
    partition: SequencePartition, schedule: ScheduleChoice, lengths: Sequence[int], machine: Machine | None = None
) -> Forecast:
    """Predict a step with segments of `lengths` tokens. `auto` counts as 1f1b; it is never slower.

    With a `machine` the times are those of its kernels and its host, where all layers of the model are alike and
    nothing is measured. Raises ValueError if the times of segments are not known.
    """
    run = partition.run
    setup = _training_setup(run, schedule, lengths)
    are_alike = setup is not None and setup.model.pattern is None and setup.model.window is None
    if machine is not None and setup is not None and are_alike and partition.profile is None:
        costs = step_costs(setup, machine)
    else:
        costs = action_costs(partition.costs, run.layers_per_stage, lengths)
    if setup is not None:
        scale = 1 if run.settings.get("bf16") or run.settings.get("fp16") else 2  # the formulas are for 16 bits
        table = tuple(tuple(scale * size for size in row) for row in activation_tables(setup)[0])
        costs = replace(costs, activation=table, kept=table)

    def schedule_of(num_microbatches: int) -> Schedule:
        if isinstance(schedule, Given):
            return schedule.schedule
        family = Named("1f1b", schedule.placement) if isinstance(schedule, Planned) else schedule
        return family.of_all_ranks(_shape(run, schedule, num_microbatches, lengths), lengths, None)

    estimate = estimate_step(schedule_of, run.num_microbatches, costs)
    total = None
    if setup is not None:
        short = schedule_of(1)
        grown = (most - least for most, least in zip(estimate.activations, peak_memory(short, costs), strict=True))
        total = max(scale * rank_memory(setup, short, rank).total + more for rank, more in enumerate(grown))
    return Forecast(estimate.seconds, estimate.bubble, max(estimate.activations), total)


def _shape(run: MegatronRun, schedule: ScheduleChoice, num_microbatches: int, lengths: Sequence[int]) -> Shape:
    placement = Placement(run.pipeline_parallel_size, run.num_chunks, schedule.placement)
    return Shape(placement, num_microbatches, len(lengths))


def _training_setup(run: MegatronRun, schedule: ScheduleChoice, lengths: Sequence[int]) -> TrainingSetup | None:
    """None where the formulas of memory do not cover the model."""
    model, settings = run.model, run.settings
    if model is None or model.experts or not are_known(model) or sum(run.layers_per_stage) != model.num_layers:
        return None
    return TrainingSetup(
        model,
        run.sequence_length,
        run.num_microbatches,
        micro_batch_size=run.micro_batch_size,
        tensor_parallel=run.tensor_parallel_size,
        context_parallel=settings.get("context_parallel_size") or 1,
        data_parallel=settings.get("data_parallel_size") or 1,
        family=schedule.name,
        placement=_shape(run, schedule, run.num_microbatches, lengths).placement,
        segments=tuple(lengths),
        layers_per_stage=run.layers_per_stage,
        sequence_parallel=bool(settings.get("sequence_parallel")),
        recompute=settings.get("recompute_granularity") or "none",
        distributed_optimizer=bool(settings.get("use_distributed_optimizer")),
        tied_embeddings=not settings.get("untie_embeddings_and_output_weights"),
    )
