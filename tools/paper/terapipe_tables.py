"""TeraPipe (arXiv 2102.07988): latencies of its settings on V100, with and without slices of sequences."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.schedule import Placement

from .programs import PaperSetup
from .row import REFERENCE, Row, gpt, known, measured, read

# The authors' code (zhuohan123/terapipe, test_transformer_terapipe.py) has the layers alone, without embedding and
# vocabulary; gradients in 16 bit, which are added when the message is sent, and summed over the replicas at the end;
# softmax in 32 bit by PyTorch's kernels; messages from one rank of a stage, which the next stage broadcasts.
_PROGRAM = dict(
    flash_attention=False,
    overlaps_messages=False,
    overlaps_tensor_parallel=False,
    gradient_bytes=2,
    fuses_kernels=False,
    scatters_messages=False,
    adds_gradients_last=True,
)
# Numbers of slices that are tried where none are known.
SLICES = (1, 2, 4, 8, 16, 32)


def setup_of(setting: dict[str, str], slices: tuple[int, ...]) -> PaperSetup:
    pipeline = int(setting["pipeline_parallel"])
    return PaperSetup(
        model=gpt(int(setting["layers"]), int(setting["hidden"]), int(setting["heads"]), 0),
        sequence_length=int(setting["seqlen"]),
        num_microbatches=int(setting["batch_per_replica"]),
        tensor_parallel=int(setting["op_parallel"]),
        data_parallel=int(setting["data_parallel"]),
        placement=Placement(pipeline),
        pipeline_before_data=True,
        family="gpipe",
        segments=slices,
        **_PROGRAM,
    )


def best_slices(setting: dict[str, str], machine: Machine) -> tuple[int, ...]:
    """Equal slices, as many as make the shortest step; TeraPipe, too, chooses them by a model of its costs."""
    cuts = [even(int(setting["seqlen"]), count) for count in SLICES]
    return min(cuts, key=lambda cut: predict(setup_of(setting, cut), machine).seconds)


@cache
def latencies(folder: Path = REFERENCE) -> tuple[Row, ...]:
    machine = read_machine("v100-p3")
    settings = _settings(folder)
    found = []
    for row in read("terapipe_latency_main", folder):
        setting = known(settings, row["setting"])
        scheme = re.search(r"\(1,\s*\[([\d,\s]+)\]\)", row["slicing_scheme"])
        slices = tuple(map(int, scheme[1].split(","))) if scheme else (int(setting["seqlen"]),)
        # The source omits the slices of setting 1.
        if not scheme and row["algorithm"] == "w/ TeraPipe":
            slices = best_slices(setting, machine)
        label = f"{row['model']}, {row['algorithm']}"
        setup = setup_of(setting, slices)
        found.append(_row("TeraPipe latencies", f"setting {row['setting']}", label, row, setup, machine))
    return tuple(found)


@cache
def further_latencies(folder: Path = REFERENCE) -> tuple[Row, ...]:
    """Of the paper's figures and of settings that the other table lacks."""
    machine = read_machine("v100-p3")
    settings = _settings(folder)
    found = []
    for row in read("terapipe_latency_figures", folder):
        setting = dict(known(settings, row["setting"]))
        for name in ("seqlen", "batch_per_replica"):
            setting[name] = row[name]
        length = int(row["seqlen"])
        scheme = row["slices"]
        if scheme.isdigit():
            slices = even(length, int(scheme))
            label = "w/o TeraPipe" if scheme == "1" else f"{scheme} equal slices"
        elif scheme == "best":
            slices = best_slices(setting, machine)
            label = "w/ TeraPipe"
        else:  # such as [120]*4 + [64]
            counts = re.findall(r"\[(\d+)\](?:\*(\d+))?", scheme)
            slices = tuple(int(tokens) for tokens, count in counts for _ in range(int(count or 1)))
            label = "w/ TeraPipe"
        group = f"figure {row['figure']}, setting {row['setting']}, {length} tokens"
        found.append(_row("TeraPipe latencies, further", group, label, row, setup_of(setting, slices), machine))
    return tuple(found)


def gains(folder: Path = REFERENCE) -> Iterator[Row]:
    """How many times faster a step is with slices."""
    return _gains("TeraPipe, gain of slices", latencies(folder))


def further_gains(folder: Path = REFERENCE) -> Iterator[Row]:
    return _gains("TeraPipe, gain of slices, further", further_latencies(folder))


def _gains(table: str, rows: Iterable[Row]) -> Iterator[Row]:
    """`rows` of one group follow each other, the first is without slices."""
    for group, members in groupby(rows, key=lambda row: row.group):
        whole, *sliced = members
        for row in sliced:
            if whole.published is None or row.published is None:
                continue
            published = whole.published / row.published
            predicted = whole.predicted / row.predicted
            yield Row(
                table=table,
                label=row.label if len(sliced) > 1 else group,
                unit="times",
                published=published,
                predicted=predicted,
            )


def _row(table: str, group: str, label: str, row: dict[str, str], setup: PaperSetup, machine: Machine) -> Row:
    seconds = predict(setup, machine).seconds
    published = measured(row["latency_s"])
    return Row(
        table=table,
        label=f"{group}, {label}",
        unit="s",
        published=published,
        predicted=seconds,
        group=group,
        setup=setup,
        machine=machine,
    )


def _settings(folder: Path) -> dict[str, dict[str, str]]:
    return {row["setting"]: row for row in (*read("terapipe_settings"), *read("terapipe_settings", folder))}
