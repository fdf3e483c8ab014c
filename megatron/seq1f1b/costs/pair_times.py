"""What a forward and a backward of two units save if a rank runs them beside each other: the exchange of experts of the
one passes while the other computes (--overlap-moe-expert-parallel-comm). Seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

from ..schedule import Action
from .layer_times import LayerTime, Parts, dispatched_again, layer_times, layers_with_experts
from .machine import Machine
from .stage_times import joined_rows, launch_times, rows_of_stage
from .training_setup import StageLayers, TrainingSetup, of_stages

Row = tuple[float, ...]  # by segment


class ExchangeRow(NamedTuple):
    """Seconds of a pair's forward and backward on one stage, in the parts that can hide each other."""

    exchange_f: Row  # tokens on the way to experts and back, in a forward, as far as compute can hide them
    compute_f: Row  # what an exchange can pass behind
    exchange_b: Row
    compute_b: Row


class BeyondLaunch(NamedTuple):
    """Seconds that a device takes longer for a forward and a backward of one stage than the host to launch them."""

    forward: Row
    backward: Row


class Hidden(NamedTuple):
    """Seconds of exchange that a forward and a backward of one stage hide at most, by segment."""

    forward: Row
    backward: Row


class Exchanges:
    """What forwards and backwards can hide of each other, from the rows of all stages."""

    def __init__(self, rows: Sequence[ExchangeRow]) -> None:
        self.rows = rows

    @cached_property
    def most_hidden(self) -> tuple[Hidden, ...]:
        """The most that forwards and backwards hide, by stage."""
        most = self._most
        hidden_by: dict[ExchangeRow, Hidden] = {}
        for row in set(self.rows):  # many stages are equal
            hidden_by[row] = Hidden(
                forward=tuple(min(exchange, most.compute_b) for exchange in row.exchange_f),
                backward=tuple(min(exchange, most.compute_f) for exchange in row.exchange_b),
            )
        return tuple(hidden_by[row] for row in self.rows)

    @cached_property
    def most_hidden_before(self) -> tuple[Row, ...]:
        """The most that forwards and backwards of each stage hide together, before each segment and after the last."""
        before: dict[int, Row] = {}  # by the identity of what is hidden, which equal stages share
        for hidden in self.most_hidden:
            if id(hidden) not in before:
                of_both = map(add, hidden.forward, hidden.backward)
                before[id(hidden)] = tuple(accumulate(of_both, initial=0.0))
        return tuple(before[id(hidden)] for hidden in self.most_hidden)

    @property
    def most_saved(self) -> float:
        """The most that any pair saves."""
        of_forwards = max(chain.from_iterable(hidden.forward for hidden in self.most_hidden))
        of_backwards = max(chain.from_iterable(hidden.backward for hidden in self.most_hidden))
        return of_forwards + of_backwards

    @cached_property
    def _most(self) -> "_Most":
        """The largest of all rows."""
        return _Most(
            compute_f=max(chain.from_iterable(row.compute_f for row in self.rows)),
            compute_b=max(chain.from_iterable(row.compute_b for row in self.rows)),
        )


class _Most(NamedTuple):
    compute_f: float
    compute_b: float


@dataclass(frozen=True)
class PairTimes:
    """What pairs of forwards and backwards save, from the rows of all stages."""

    exchanges: Exchanges
    beyond_launch: Sequence[BeyondLaunch]

    def saved(self, forward: Action, backward: Action) -> float:
        """What the two take less beside each other than one after the other: each hides its exchange behind the compute
        of the other, layer by layer. The host launches both, one after the other."""
        row_f = self.exchanges.rows[forward.stage]
        row_b = self.exchanges.rows[backward.stage]
        hidden_f = min(row_f.exchange_f[forward.segment], row_b.compute_b[backward.segment])
        hidden_b = min(row_b.exchange_b[backward.segment], row_f.compute_f[forward.segment])
        beyond_f = self.beyond_launch[forward.stage].forward[forward.segment]
        beyond_b = self.beyond_launch[backward.stage].backward[backward.segment]
        return min(hidden_f + hidden_b, beyond_f + beyond_b)

    def of_stages(self, stages: Iterable[int]) -> "PairTimes":
        """What pairs save on some of the stages, in this order."""
        chosen = tuple(stages)
        rows = [self.exchanges.rows[stage] for stage in chosen]
        return PairTimes(Exchanges(rows), [self.beyond_launch[stage] for stage in chosen])


def pair_times(setup: TrainingSetup, machine: Machine) -> PairTimes:
    """What pairs save on all stages of a set-up."""
    return _pair_times(setup.layer_setup, machine, setup.layers_per_stage)


@lru_cache(maxsize=8192)
def _pair_times(layer_setup: TrainingSetup, machine: Machine, layers_per_stage: tuple[int, ...]) -> PairTimes:
    return PairTimes(
        _exchanges(_exchange_setup(layer_setup), machine, layers_per_stage),
        of_stages(layer_setup.model, layers_per_stage, lambda stage: _beyond_launch(layer_setup, machine, stage)),
    )


def exchanges(setup: TrainingSetup, machine: Machine) -> Exchanges:
    """What can be hidden on all stages of a set-up."""
    return _exchanges(_exchange_setup(setup.layer_setup), machine, setup.layers_per_stage)


@lru_cache(maxsize=8192)
def _exchange_setup(layer_setup: TrainingSetup) -> TrainingSetup:
    """The set-up with a fixed value of all that does not matter to exchanges: of what is computed again, all but whole
    experts. Set-ups that differ in that share their exchanges."""
    time_setup = layer_setup.time_setup
    return time_setup if time_setup.repeats("E") else time_setup.without_recomputation().time_setup


@lru_cache(maxsize=8192)
def _exchanges(setup: TrainingSetup, machine: Machine, layers_per_stage: tuple[int, ...]) -> Exchanges:
    return Exchanges(of_stages(setup.model, layers_per_stage, lambda stage: exchange_row(setup, machine, stage)))


@lru_cache(maxsize=8192)
def exchange_row(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> ExchangeRow:
    """The row of one stage. Its embedding, its loss and what its backward computes again hide nothing; tokens that
    travel to experts once more are hidden. Of an exchange a share passes beside compute. While one of the two waits
    for its counts of tokens the other computes, so that nothing of this shows."""
    if setup.parts:
        of_parts = [exchange_row(part.layer_setup, machine, stage) for part in setup.parts]
        return ExchangeRow(*joined_rows(of_parts))
    hidden = machine.device.hidden_exchange
    of_layers = [(count, _overlaps_of_layer(setup.time_setup, machine, layer)) for layer, count in stage.layers]
    waits = machine.host.counts * layers_with_experts(setup.model, stage)
    waits_again = waits if setup.repeats("E") else 0.0
    of_segments = []
    for segment in range(len(setup.segments)):
        exchange_f = compute_f = exchange_b = compute_b = 0.0
        for count, of_layer in of_layers:
            overlaps = of_layer[segment]
            exchange_f += count * overlaps.exchange_f
            compute_f += count * overlaps.compute_f
            exchange_b += count * overlaps.exchange_b
            compute_b += count * overlaps.compute_b
        of_segments.append((hidden * exchange_f + waits, compute_f, hidden * exchange_b + waits_again, compute_b))
    return ExchangeRow(*zip(*of_segments, strict=True))


@lru_cache(maxsize=8192)
def _beyond_launch(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> BeyondLaunch:
    if setup.parts:
        of_parts = [_beyond_launch(part.layer_setup, machine, stage) for part in setup.parts]
        return BeyondLaunch(*joined_rows(of_parts))
    launching = launch_times(setup, machine, stage)
    launch_f = launching.forward + machine.host.action
    launch_b = launching.backward + machine.host.action
    rows = rows_of_stage(setup, machine, stage)
    return BeyondLaunch(
        forward=tuple(f - launch_f for f in rows.f),
        backward=tuple(i + w - launch_b for i, w in zip(rows.i, rows.w, strict=True)),
    )


class _Overlaps(NamedTuple):
    """Seconds of a segment in a layer: on the way to experts and back, and of compute, forward and backward."""

    exchange_f: float
    compute_f: float
    exchange_b: float
    compute_b: float


@lru_cache(maxsize=8192)
def _overlaps_of_layer(setup: TrainingSetup, machine: Machine, layer: int) -> tuple[_Overlaps, ...]:
    """Those of each segment; stages share them."""
    found = []
    for time in layer_times(setup, machine, layer):
        of_segment = _Overlaps(
            exchange_f=time.forward.dispatch,
            compute_f=_computing(time.forward),
            exchange_b=_exchanged_back(setup, time),
            compute_b=_computing(time.input) + time.weight,
        )
        found.append(of_segment)
    return tuple(found)


def _exchanged_back(setup: TrainingSetup, time: LayerTime) -> float:
    """The exchange in the backward of a layer."""
    return time.input.dispatch + dispatched_again(setup, time.forward)


def _computing(parts: Parts) -> float:
    """Products and attention fill a device; other kernels share its memory with an exchange."""
    return parts.matmul + parts.attention
