"""What a forward and a backward of two units save if a rank runs them beside each other: the exchange of experts of the
one passes while the other computes (--overlap-moe-expert-parallel-comm). Seconds."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

from ..schedule import Action
from .layer_times import LayerTime, Parts, dispatched_again, has_experts, layer_times
from .machine import Machine
from .stage_times import joined_rows, launch_times, rows_of_stage
from .training_setup import StageLayers, TrainingSetup, of_stages

Row = tuple[float, ...]  # by segment


class PairRow(NamedTuple):
    """Seconds of a pair's forward and backward on one stage, in the parts that can hide each other."""

    exchange_f: Row  # tokens on the way to experts and back, in a forward, as far as compute can hide them
    compute_f: Row  # what an exchange can pass behind
    exchange_b: Row
    compute_b: Row
    # What the device takes longer than the host needs to launch all of it.
    beyond_launch_f: Row
    beyond_launch_b: Row


class Hidden(NamedTuple):
    """Seconds of exchange that a forward and a backward of one stage hide at most, by segment."""

    forward: Row
    backward: Row


class PairTimes:
    """What pairs of forwards and backwards save, from the rows of all stages."""

    def __init__(self, rows: Sequence[PairRow]) -> None:
        self.rows = rows

    def saved(self, forward: Action, backward: Action) -> float:
        """What the two take less beside each other than one after the other: each hides its exchange behind the compute
        of the other, layer by layer. The host launches both, one after the other."""
        row_f = self.rows[forward.stage]
        row_b = self.rows[backward.stage]
        hidden_f = min(row_f.exchange_f[forward.segment], row_b.compute_b[backward.segment])
        hidden_b = min(row_b.exchange_b[backward.segment], row_f.compute_f[forward.segment])
        beyond_launch = row_f.beyond_launch_f[forward.segment] + row_b.beyond_launch_b[backward.segment]
        return min(hidden_f + hidden_b, beyond_launch)

    @cached_property
    def most_hidden(self) -> tuple[Hidden, ...]:
        """The most that forwards and backwards hide, by stage."""
        most = self._most
        hidden_by: dict[PairRow, Hidden] = {}
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


def pair_times(setup: TrainingSetup, machine: Machine) -> PairTimes:
    """What pairs save on all stages of a set-up."""
    return _pair_times(setup.layer_setup, machine, setup.layers_per_stage)


@lru_cache(maxsize=8192)
def _pair_times(layer_setup: TrainingSetup, machine: Machine, layers_per_stage: tuple[int, ...]) -> PairTimes:
    return PairTimes(
        of_stages(layer_setup.model, layers_per_stage, lambda stage: pair_row(layer_setup, machine, stage))
    )


@lru_cache(maxsize=8192)
def pair_row(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> PairRow:
    """The row of one stage. Its embedding, its loss and what its backward computes again hide nothing; tokens that
    travel to experts once more are hidden. Of an exchange a share passes beside compute. While one of the two waits
    for its counts of tokens the other computes, so that nothing of this shows."""
    if setup.parts:
        of_parts = [pair_row(part.layer_setup, machine, stage) for part in setup.parts]
        return PairRow(*joined_rows(of_parts))
    hidden = machine.device.hidden_exchange
    of_layers = [(count, _overlaps_of_layer(setup, machine, layer)) for layer, count in stage.layers]
    launching = launch_times(setup, machine, stage)
    launch_f = launching.forward + machine.host.action
    launch_b = launching.backward + machine.host.action
    waits = machine.host.counts * sum(count for layer, count in stage.layers if has_experts(setup, layer))
    waits_again = waits if setup.repeats("E") else 0.0
    rows: dict[str, list[float]] = {name: [] for name in PairRow._fields}
    for segment, (f, i, w) in enumerate(zip(*rows_of_stage(setup, machine, stage), strict=True)):
        exchange_f = compute_f = exchange_b = compute_b = 0.0
        for count, of_segments in of_layers:
            of_layer = of_segments[segment]
            exchange_f += count * of_layer.exchange_f
            compute_f += count * of_layer.compute_f
            exchange_b += count * of_layer.exchange_b
            compute_b += count * of_layer.compute_b
        rows["exchange_f"].append(hidden * exchange_f + waits)
        rows["compute_f"].append(compute_f)
        rows["exchange_b"].append(hidden * exchange_b + waits_again)
        rows["compute_b"].append(compute_b)
        rows["beyond_launch_f"].append(f - launch_f)
        rows["beyond_launch_b"].append(i + w - launch_b)
    columns = {name: tuple(values) for name, values in rows.items()}
    return PairRow(**columns)


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
