"""What PyTorch's allocator holds beyond the peak of what is allocated, by its own two counters.

`third_party_allocator.csv` has both for every stage of runs with one to eight lengths of segments; no prediction of
ours takes part in the fit, whose result is in costs/step_memory.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.seq1f1b.costs.layer_bytes import loss_bytes

from .row import read
from .seq1f1b_tables import third_party_setup

_MIB_OF_GIB = 1024


@dataclass(frozen=True)
class Measured:
    """One stage of a run. MiB: what comes and goes at its peak, the logits of the loss, and what is held beyond."""

    log: str
    dynamic: float
    num_lengths: int
    logits: float
    held_back: float


def measured() -> list[Measured]:
    """Adam makes its moments at the end of the first iteration, whose peak of what is allocated is known; what is
    reserved is known after five. A run that ended before has no place here."""
    found = []
    for row in read("third_party_allocator"):
        if not row["max_reserved_GiB_iteration_5"]:
            continue
        setup = third_party_setup(row)
        parameters = int(row["parameters"]) / 2**20
        before, after = (parameters * (6 + state / setup.data_parallel) for state in (4, 12))
        dynamic = float(row["max_allocated_MiB_iteration_1"]) - before
        is_last = row.index("stage") == setup.pipeline_parallel - 1
        logits = loss_bytes(setup, max(setup.segments)) / 2**20
        found.append(
            Measured(
                log=row["log"],
                dynamic=dynamic,
                num_lengths=len(set(setup.segments)),
                logits=logits if is_last else 0.0,
                held_back=float(row["max_reserved_GiB_iteration_5"]) * _MIB_OF_GIB - after - dynamic,
            )
        )
    return found


def fit(rows: Iterable[Measured]) -> tuple[float, float, float]:
    """Shares of what comes and goes, of the same whenever the number of lengths doubles, and of the logits; each row
    counts alike."""
    features = np.array([[1.0, np.log2(row.num_lengths), row.logits / row.dynamic] for row in rows])
    shares = np.array([row.held_back / row.dynamic for row in rows])
    share, for_each_doubling, of_logits = np.linalg.lstsq(features, shares, rcond=None)[0].tolist()
    return share, for_each_doubling, of_logits


def error(row: Measured, constants: Sequence[float]) -> float:
    """Of all that comes and goes, with what is held back, relative to what was reserved."""
    share, for_each_doubling, of_logits = constants
    held_back = (share + for_each_doubling * np.log2(row.num_lengths)) * row.dynamic + of_logits * row.logits
    return (held_back - row.held_back) / (row.dynamic + row.held_back)


def markdown() -> str:
    lines = [
        "## What the allocator holds back",
        "",
        "Measured by its own counters on runs of a fork of the authors' code (tools/paper/allocator.py): a share of",
        "what comes and goes, a share of it whenever the number of lengths of segments doubles, and a share of the",
        "logits. Each run is left out once, and its stages are off by this much of what was reserved for what comes",
        "and goes; only the run with whole sequences shows what logits alone take:",
        "",
        "| left out | stages | mean error | worst | shares |",
        "|---|---|---|---|---|",
    ]
    rows = measured()
    for log in dict.fromkeys(row.log for row in rows):
        constants = fit([row for row in rows if row.log != log])
        errors = [abs(error(row, constants)) for row in rows if row.log == log]
        mean = sum(errors) / len(errors)
        worst = max(errors)
        shares = ", ".join(f"{value:.3f}" for value in constants)
        lines.append(
            f"| {log.removesuffix('.log')} | {len(errors)} | {100 * mean:.1f} % | {100 * worst:.1f} % | {shares} |"
        )
    return "\n".join(lines) + "\n"
