"""How well fitted constants predict rows that they were not fitted on: each group of rows is left out once.

A machine file marks which of its constants are fitted, and on what. Relative errors are nearly linear in the logarithms
of these constants, so one more prediction of every row for each constant gives their slopes, and least squares without
a group the constants that would have been fitted without it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import exp, log

import numpy as np
from msgspec import structs

from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.simulator import predict

from . import hopper, megatron_tables, seq1f1b_tables, vtrain
from .row import Row

_STEP = log(1.05)  # of a constant, for its slope


@dataclass(frozen=True)
class Fit:
    """Constants of a machine as `part.name`, the rows that they were fitted on, and which of these go together."""

    machine: str
    constants: tuple[str, ...]
    rows: Callable[[], Iterable[Row]]
    group: Callable[[Row], str]
    on: Callable[[Row, Machine], Machine] = lambda row, machine: machine  # that of a row, made of the one fitted


@dataclass(frozen=True)
class HeldOut:
    """The errors of a group by constants that were fitted without it."""

    machine: str
    group: str
    constants: dict[str, float]
    count: int
    mean: float
    worst: float


def _seq1f1b() -> Iterable[Row]:
    yield from (row for row in seq1f1b_tables.throughput() if row.published is not None)
    yield from (row for row in seq1f1b_tables.third_party() if row.unit == "s")


def _megatron() -> Iterable[Row]:
    yield from megatron_tables.sc21()
    yield from megatron_tables.recomputation()


def _hopper() -> Iterable[Row]:
    yield from (row for row in hopper.kwai() if row.table == hopper.WITHOUT_OFFLOAD)
    yield from (row for row in hopper.long() if any(f" {length}K" in row.label for length in (64, 256, 1024)))


FITS = (
    Fit(
        machine="a100-seq1f1b",
        constants=("device.matmul_efficiency", "host.action", "network.bandwidth"),
        rows=_seq1f1b,
        group=lambda row: row.group.rsplit(",", 1)[0] if row.group else "third-party runs",
    ),
    Fit(
        machine="a100-vtrain",
        constants=("device.kernel_latency", "host.layer_forward", "host.layer_backward", "host.action", "host.step"),
        rows=vtrain.single_node,
        group=lambda row: "hidden size " + row.label.split(",")[0].split(" x ")[1],
    ),
    Fit(
        machine="a100-80gb",
        constants=("device.matmul_efficiency", "device.memory_efficiency"),
        rows=_megatron,
        group=lambda row: row.table,
    ),
    Fit(
        machine="h100-80gb",
        constants=("device.matmul_efficiency", "device.flash_backward"),
        rows=_hopper,
        group=lambda row: f"{row.table}, {row.label}",
        on=hopper.on,
    ),
)


def held_out(fits: Sequence[Fit] = FITS, progress: Callable[[str], None] = lambda text: None) -> list[HeldOut]:
    """One entry for each group."""
    found = []
    for fit in fits:
        progress(f"{fit.machine}\n")
        rows = list(fit.rows())
        machine = read_machine(fit.machine)
        errors = np.array([error(row, fit.on(row, machine)) for row in rows])
        changed = [_scaled(machine, name, exp(_STEP)) for name in fit.constants]
        slopes = np.array([[error(row, fit.on(row, other)) for other in changed] for row in rows])
        slopes = (slopes - errors[:, None]) / _STEP
        groups = np.array([fit.group(row) for row in rows])
        for group in dict.fromkeys(groups.tolist()):
            inside = groups == group
            steps, *_ = np.linalg.lstsq(slopes[~inside], -errors[~inside], rcond=0.05)
            left = np.abs(errors[inside] + slopes[inside] @ steps)
            constants = {name: _get(machine, name) * exp(step) for name, step in zip(fit.constants, steps, strict=True)}
            found.append(
                HeldOut(
                    machine=fit.machine,
                    group=group,
                    constants=constants,
                    count=len(left),
                    mean=float(left.mean()),
                    worst=float(left.max()),
                )
            )
    return found


def error(row: Row, machine: Machine) -> float:
    """Relative, of the prediction for another machine than that of the row."""
    assert row.setup is not None and row.published is not None
    prediction = predict(row.setup, machine)
    value = prediction.seconds if row.unit == "s" else prediction.tokens_per_second
    return value / row.published - 1


def markdown(entries: Sequence[HeldOut]) -> str:
    lines = [
        "## Constants fitted without the rows they predict",
        "",
        "Every group is left out once: the constants are fitted on the others, by linear least squares, and predict it",
        "(tools/paper/held_out.py).",
        "",
        "| machine | left out | rows | mean error | worst | constants |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        constants = ", ".join(f"{name.split('.')[1]} {value:.3g}" for name, value in entry.constants.items())
        lines.append(
            f"| {entry.machine} | {entry.group} | {entry.count} | {100 * entry.mean:.1f} % | "
            f"{100 * entry.worst:.1f} % | {constants} |"
        )
    return "\n".join(lines) + "\n"


def _get(machine: Machine, name: str) -> float:
    return float(reduce(getattr, name.split("."), machine))


def _scaled(machine: Machine, name: str, factor: float) -> Machine:
    part, field = name.split(".")
    changed = structs.replace(getattr(machine, part), **{field: factor * _get(machine, name)})
    return replace(machine, **{part: changed})
