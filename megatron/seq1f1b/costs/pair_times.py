"""What a forward and a backward of two units save if a rank runs them beside each other: the exchange of experts of the
one passes while the other computes (--overlap-moe-expert-parallel-comm). Seconds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..schedule import Action
from ..schedule.cost_tables import Table
from .layer_times import Parts, dispatched_again, layer_time
from .machine import Machine
from .training_setup import StageLayers, TrainingSetup


class PairRow(NamedTuple):
    """Of one stage, by segment."""

    exchange_f: tuple[float, ...]  # tokens on the way to experts and back, in a forward
    compute_f: tuple[float, ...]  # what an exchange can pass behind
    exchange_b: tuple[float, ...]
    compute_b: tuple[float, ...]


@dataclass(frozen=True)
class PairTimes:
    """The parts of forwards and backwards that matter to pairs, `table[stage][segment]`."""

    exchange_f: Table
    compute_f: Table
    exchange_b: Table
    compute_b: Table

    def saved(self, forward: Action, backward: Action) -> float:
        """What the two take less beside each other than one after the other: each hides its exchange behind the compute
        of the other, layer by layer."""
        of_forward = (forward.stage, forward.segment)
        of_backward = (backward.stage, backward.segment)
        hidden_f = min(_at(self.exchange_f, of_forward), _at(self.compute_b, of_backward))
        hidden_b = min(_at(self.exchange_b, of_backward), _at(self.compute_f, of_forward))
        return hidden_f + hidden_b

    @property
    def most_saved(self) -> float:
        """The most that any pair saves."""
        hidden_f = min(_most(self.exchange_f), _most(self.compute_b))
        hidden_b = min(_most(self.exchange_b), _most(self.compute_f))
        return hidden_f + hidden_b

    @property
    def most_saved_by_forward(self) -> Table:
        """The most that a pair with this forward saves."""
        most_compute = _most(self.compute_b)
        most_exchange = _most(self.exchange_b)
        return tuple(
            tuple(
                min(exchange, most_compute) + min(most_exchange, compute)
                for exchange, compute in zip(*rows, strict=True)
            )
            for rows in zip(self.exchange_f, self.compute_f, strict=True)
        )


def _most(table: Table) -> float:
    return max(max(row) for row in table)


def _at(table: Table, place: tuple[int, int]) -> float:
    stage, segment = place
    return table[stage][segment]


def pair_times(setup: TrainingSetup, machine: Machine) -> PairTimes:
    """Those of all stages."""
    rows = {stage: pair_row(setup.alone, machine, stage) for stage in set(setup.stages)}
    found = [rows[stage] for stage in setup.stages]
    return PairTimes(
        exchange_f=tuple(row.exchange_f for row in found),
        compute_f=tuple(row.compute_f for row in found),
        exchange_b=tuple(row.exchange_b for row in found),
        compute_b=tuple(row.compute_b for row in found),
    )


@lru_cache(maxsize=8192)
def pair_row(setup: TrainingSetup, machine: Machine, stage: StageLayers) -> PairRow:
    """Those of one stage. Its embedding, its loss and what its backward computes again hide nothing; tokens
    that travel to experts once more are hidden."""
    columns = []
    for span in setup.spans:
        times = [(count, layer_time(setup, machine, *span, layer)) for layer, count in stage.layers]
        columns.append(
            (
                sum(count * time.forward.dispatch for count, time in times),
                sum(count * _computing(time.forward) for count, time in times),
                sum(count * (time.input.dispatch + dispatched_again(setup, time.forward)) for count, time in times),
                sum(count * (_computing(time.input) + time.weight) for count, time in times),
            )
        )
    return PairRow(*zip(*columns, strict=True))


def _computing(parts: Parts) -> float:
    """Products and attention fill a device; other kernels share its memory with an exchange."""
    return parts.matmul + parts.attention
