"""The costs of one run for the core (`Predictions`), by formulas or measured.

Tested in arguments/test_config.py.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import fmean
from typing import NamedTuple

from ..arguments import AUTO, MegatronRun, device_memory, gpu_name, is_on_cpu
from ..files.typed import named_by
from ..partition import SegmentTime
from ..schedule import Costs, Schedule, ScheduleChoice, Shape, build, moved, simulate
from .blocks import PaperFlops, paper_flops
from .layer_bytes import keeps_logits, moved_bytes
from .machine import Device, Machine, read_machine
from .model_shape import ModelShape, model_shape
from .simulator import extended
from .stage_costs import (
    A100,
    CPU_CORE,
    StageCost,
    TracedCosts,
    action_costs,
    bottleneck_time,
    read_traced_costs,
    setup_costs,
)
from .stage_times import step_costs
from .step_memory import rank_memory
from .training_setup import TrainingSetup, choices_of, has_costs

# Numbers of segments to try; others make a step at most a few percent shorter.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SAFE_LENGTH = 1024  # tokens; kernels of a GPU are slower in shorter segments
_USABLE = 0.9  # of a device; context, communicators, workspaces and fragments take the rest


@dataclass(frozen=True)
class Forecast:
    """A training step before it starts, without its optimizer."""

    seconds: float
    bubble: float
    activations: float  # bytes at the peak, on the rank with the most
    total_bytes: float  # of all memory, on the fullest rank


class _StepMemory(NamedTuple):
    """The memory of a step. Bytes."""

    activations: float  # on the rank with the most
    total_bytes: float  # of all memory, on the fullest rank


class _StepNumbers(NamedTuple):
    """What a long step is extrapolated from, see `extended`."""

    seconds: float
    busy: float  # seconds of compute of a rank, on average
    activations: float  # bytes on the rank with the most
    total_bytes: float  # on the fullest rank


@dataclass(frozen=True)
class RunCosts:
    """The costs of the segments of `run`: by formulas for its device, or as the trace that `flags` name has them.

    What the core asks for is documented in `Predictions`.
    """

    flags: argparse.Namespace
    run: MegatronRun

    @property
    def is_measured(self) -> bool:
        return self.flags.sequence_split_profile is not None

    @property
    def _device(self) -> Device:
        return CPU_CORE if is_on_cpu(self.flags) else A100

    @property
    def full_speed_rows(self) -> int:
        return self._device.full_speed_rows

    @property
    def machine(self) -> Machine:
        """The machine of this package nearest to that of the run."""
        if is_on_cpu(self.flags):
            return read_machine("cpu")
        return read_machine("a100-80gb" if "A100" in gpu_name(self.flags) else "h100-80gb")

    def _fits(self, total_bytes: float) -> bool:
        return total_bytes <= _USABLE * device_memory(self.flags)

    @cached_property
    def model(self) -> ModelShape | None:
        """The sizes of the model, if they are known."""
        return model_shape(self.run.settings) if self.run.has_sizes else None

    @property
    def has_loss_in_pieces(self) -> bool:
        """Whether logits are computed in pieces instead of kept; False for unknown sizes."""
        return self.model is not None and not keeps_logits(self._whole)

    @property
    def flops(self) -> PaperFlops | None:
        return None if self.model is None else paper_flops(self.model)

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """The cost of a segment of a micro-batch on every stage. Raises ValueError where it is unknown."""
        return self.measured.stages if self.is_measured else setup_costs(self._whole, self._device)

    @cached_property
    def measured(self) -> TracedCosts:
        """The costs by the trace."""
        with named_by("--sequence-split-profile"):
            return read_traced_costs(self.flags.sequence_split_profile, len(self.run.layers_per_stage))

    def time(self, of_any_length: bool = False) -> SegmentTime:
        if of_any_length and self.is_measured:
            raise ValueError(
                f"--sequence-split-profile {self.flags.sequence_split_profile} has no times of shorter segments, so "
                "--sequence-split-strategy terapipe cannot choose their number; give --sequence-splits"
            )
        return bottleneck_time(self.stages)

    def of_actions(self, lengths: Sequence[int]) -> Costs:
        return action_costs(self.stages, self.run.layers_per_stage, lengths)

    def best_num_segments(self, schedule: ScheduleChoice, cut: Callable[[int], tuple[int, ...]]) -> int:
        """The number of segments with the shortest step among those that fit; the one with the least memory if none
        fits. The search ends where the overhead of actions makes steps longer. Raises ValueError if the sequence cannot
        be cut at all."""
        forecasts: dict[int, Forecast] = {}
        least = max(1 if self.is_measured else _SAFE_LENGTH, self.full_speed_rows)  # tokens on average
        most = max(1, self.run.sequence_length // least)
        for count in (count for count in _CANDIDATES if count <= most):
            try:
                lengths = cut(count)
            except ValueError:
                if not forecasts:
                    raise
                break
            forecasts[count] = self.forecast(schedule, lengths)
            fitting = [number for number, forecast in forecasts.items() if self._fits(forecast.total_bytes)]
            seconds = [inf, *(forecast.seconds for forecast in forecasts.values())]
            if fitting and seconds[-1] > seconds[-2] > min(seconds):  # two in a row are longer than the shortest
                break
        if fitting:
            return min(fitting, key=lambda number: forecasts[number].seconds)
        return min(forecasts, key=lambda number: forecasts[number].total_bytes)

    def least_offload(self, schedule: ScheduleChoice, lengths: Sequence[int]) -> float:
        """The least share of activations, in sixteenths, that must move to the host for the step to fit; 1.0 if even
        that is not enough."""
        setup = self._training_setup(schedule, lengths)

        def fits(sixteenths: int) -> bool:
            return self._fits(self._memory(schedule, setup, sixteenths / 16))

        # A step that fits with one share fits with every larger one.
        return min(bisect_left(range(17), True, key=fits), 16) / 16

    def forecast(self, schedule: ScheduleChoice, lengths: Sequence[int], share: float | None = None) -> Forecast:
        """A step on `machine`, or by the trace; `auto` counts as 1f1b, and is never slower. A `share` of activations
        moves to the host in no time; None: that of the flags. Raises ValueError if times of segments are unknown."""
        if share is None:
            share = 0.0 if self.flags.offload_activations == AUTO else self.flags.offload_activations
        setup = self._training_setup(schedule, lengths)
        costs = self._action_costs(setup)

        def simulated(num_microbatches: int) -> _StepNumbers:
            shape = replace(setup, num_microbatches=num_microbatches).shape
            actions = _actions(schedule, shape)
            timeline = simulate(actions.without_moves(), costs)
            memory = self._memory_of(actions, setup, share)
            return _StepNumbers(
                seconds=timeline.makespan,
                busy=fmean(map(timeline.busy, range(setup.pipeline_parallel))),
                activations=memory.activations,
                total_bytes=memory.total_bytes,
            )

        if schedule.given is None:
            step = _StepNumbers(*extended(setup.shape, simulated))
        else:
            step = simulated(setup.num_microbatches)
        bubble = 1 - step.busy / step.seconds if step.seconds else 0.0
        return Forecast(step.seconds, bubble, step.activations, step.total_bytes)

    def _memory(self, schedule: ScheduleChoice, setup: TrainingSetup, share: float) -> float:
        """Bytes of all memory, on the fullest rank."""

        def counted(num_microbatches: int) -> _StepMemory:
            shape = replace(setup, num_microbatches=num_microbatches).shape
            return self._memory_of(_actions(schedule, shape), setup, share)

        if schedule.given is None:
            return _StepMemory(*extended(setup.shape, counted)).total_bytes
        return counted(setup.num_microbatches).total_bytes

    def _memory_of(self, actions: Schedule, setup: TrainingSetup, share: float) -> _StepMemory:
        """The memory of a step of which a `share` of the activations moves to the host."""
        orders = moved(actions, share, setup.moves_by_layer).ranks
        memory = [rank_memory(setup, order, rank) for rank, order in enumerate(orders)]
        held = max(use.activations + use.keys_values + use.states + use.logits for use in memory)
        total = max(use.total for use in memory)
        return _StepMemory(self._scale * held, self._scale * total)

    def host_rate(self, schedule: ScheduleChoice, lengths: Sequence[int], share: float) -> float:
        """The bytes/s at which every unit can move to the host while its forward runs."""
        setup = replace(self._training_setup(schedule, lengths), offloads=share)
        rows = zip(moved_bytes(setup), self._action_costs(setup).f, strict=True)
        return self._scale * max(size / seconds for row in rows for size, seconds in zip(*row, strict=True))

    def _action_costs(self, setup: TrainingSetup) -> Costs:
        return self.of_actions(setup.segments) if self.is_measured else step_costs(setup, self.machine)

    def forecast_of_megatron(self) -> Forecast:
        """A step of Megatron's own 1F1B."""
        flags = argparse.Namespace(**vars(self.flags) | {"keep_logits": True, "offload_activations": 0.0})
        return replace(self, flags=flags).forecast(ScheduleChoice("1f1b"), (self.run.sequence_length,))

    @property
    def _scale(self) -> int:
        """The factor on the formulas of memory, which are for 16 bits."""
        return 1 if self.run.settings.get("bf16") or self.run.settings.get("fp16") else 2

    @property
    def _whole(self) -> TrainingSetup:
        return self._training_setup(ScheduleChoice("1f1b"), (self.run.sequence_length,))

    def _training_setup(self, schedule: ScheduleChoice, lengths: Sequence[int]) -> TrainingSetup:
        run = self.run
        settings = self.run.settings
        if self.model is None:
            raise ValueError("costs are those of a transformer of known sizes, which this model is not")
        choices = choices_of(settings, run.layers_per_stage, self.flags.recompute_keeps_attention)
        if not has_costs(choices["recompute"]):
            choices["recompute"] = "none"
        return TrainingSetup(
            self.model,
            run.sequence_length,
            run.num_microbatches,
            run.micro_batch_size,
            run.tensor_parallel_size,
            context_parallel=settings.get("context_parallel_size") or 1,
            data_parallel=settings.get("data_parallel_size") or 1,
            family=_family(schedule),
            placement=run.shape(schedule.placement, len(lengths)).placement,
            segments=tuple(lengths),
            tied_embeddings=not settings.get("untie_embeddings_and_output_weights"),
            partitions_state=bool(settings.get("partition_state")),
            keeps_logits=self.flags.keep_logits,
            layers_leaving=self.flags.offload_layers_leaving,
            **choices,
        )


def _actions(schedule: ScheduleChoice, shape: Shape) -> Schedule:
    """The actions of a step; `auto` counts as 1f1b."""
    return schedule.given or build("1f1b" if schedule.is_auto else schedule.name, shape, pairs=schedule.pairs)


def _family(schedule: ScheduleChoice) -> str:
    """The family whose costs a schedule has; for one from a file, a family that splits backwards if it does."""
    if schedule.given is None:
        return schedule.name
    return "zb-h1" if schedule.splits_backwards else "1f1b"
