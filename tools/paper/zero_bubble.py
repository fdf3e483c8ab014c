"""Zero Bubble (arXiv 2401.10241), tables 4 and 5: memory, and bubble rates that its authors computed.

As there, from profiled times, all stages take as long as one in the middle, and a rate is the idle share of the slowest
stage between its own first and last action.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron.seq1f1b.costs.layer_bytes import unit_bytes
from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import balanced_layers, step_costs
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.schedule import Costs, Holds, Placement, Schedule, auto, build, peak_memory, simulate
from megatron.seq1f1b.schedule.cost_tables import Table

from .programs import PaperSetup
from .row import REFERENCE, Row, gpt, measured, read

_PROGRAM = dict(flash_attention=False, dropout=True)
_FAMILIES = {"1F1B": "1f1b", "1F1B-I": "1f1b", "ZB-H1": "zb-h1", "ZB-1p": "auto", "ZB-2p": "auto"}


class Case(NamedTuple):
    """A row with its schedule, planned by costs that are the same for all stages."""

    row: dict[str, str]
    label: str
    setup: PaperSetup
    machine: Machine
    costs: Costs
    schedule: Schedule


@cache
def _cases(folder: Path) -> tuple[Case, ...]:
    """ZB-H2 has no counterpart in this package; ZB-1p and ZB-2p are met by `auto` under the same memory."""
    machine = read_machine("a100-80gb")
    return tuple(_case(row, machine) for row in read("zero_bubble_tables345", folder) if row["method"] in _FAMILIES)


def _case(row: dict[str, str], machine: Machine) -> Case:
    layers = int(row["layers"])
    ranks = int(row["pipeline_gpus"])
    # The first and the last stage have a layer less; the stages of interleaved 1F1B have one each.
    chunks = (layers + 2) // ranks if row["method"] == "1F1B-I" else 1
    per_stage = (layers + 2) // (ranks * chunks)
    setup = PaperSetup(
        model=gpt(layers, int(row["hidden"]), int(row["heads"]), 50304),
        sequence_length=int(row["seqlen"]),
        num_microbatches=int(row["micro_batches"]),
        micro_batch_size=int(row["micro_batch_size"]),
        placement=Placement(ranks, chunks),
        family=_FAMILIES[row["method"]],
        layers_per_stage=(per_stage - 1, *(per_stage,) * (ranks * chunks - 2), per_stage - 1),
        **_PROGRAM,
    )
    costs = _with_memory(step_costs(setup, machine), setup)
    middle = setup.placement.num_stages // 2

    def same(table: Table) -> Table:
        return (table[middle],) * len(table)

    costs = replace(costs, **{name: same(table) for name, table in vars(costs).items()})
    if setup.family == "auto":
        limit = max(peak_memory(build("1f1b", setup.shape), costs)) * int(row["method"][3])
        schedule = auto(setup.shape, costs, limit)
    else:
        schedule = build(setup.family, setup.shape)
    label = f"{row['model']}, {row['micro_batches']} micro-batches, {row['method']}"
    return Case(
        row=row,
        label=label,
        setup=setup,
        machine=machine,
        costs=costs,
        schedule=schedule,
    )


def _with_memory(costs: Costs, setup: PaperSetup) -> Costs:
    """The costs with the bytes that units keep; a schedule may keep no more for W than it held before."""
    held, for_weights = (
        tuple(tuple(unit_bytes(setup, stage, after).sum(axis=1).tolist()) for stage in setup.stages)
        for after in (Holds.ACTIVATIONS, Holds.FOR_WEIGHTS)
    )
    least = tuple(tuple(map(min, *rows)) for rows in zip(for_weights, held, strict=True))
    return replace(costs, activation=held, activation_for_w=least)


def bubble_rates(folder: Path = REFERENCE) -> Iterator[Row]:
    for row, label, setup, machine, costs, schedule in _cases(folder):
        timeline = simulate(schedule, costs)
        yield Row(
            table="Zero Bubble, auto above ZB-2p" if row["method"] == "ZB-2p" else "Zero Bubble bubble rates",
            label=label,
            unit="bubble",
            published=float(row["bubble_rate_theoretical"]),
            predicted=1 - timeline.busy(0) / timeline.longest_stretch,
            group=f"{row['model']}, {row['micro_batches']} micro-batches",
            setup=setup,
            machine=machine,
            less_is_better=row["method"] == "ZB-2p",
        )


def memory(folder: Path = REFERENCE) -> Iterator[Row]:
    """What is allocated on the fullest rank at its peak, as the authors' code prints it, in GB of 1e9 bytes.

    `auto` takes what it may, so ZB-2p has no counterpart.
    """
    for row, label, setup, machine, _, schedule in _cases(folder):
        if row["memory_GB"] and row["method"] != "ZB-2p":
            ranks = [rank_memory(setup, schedule.ranks[rank], rank) for rank in range(setup.pipeline_parallel)]
            most = max(memory_of_rank.total - memory_of_rank.reserved for memory_of_rank in ranks) / 1e9
            yield Row(
                table="Zero Bubble memory",
                label=label,
                unit="GB",
                published=measured(row["memory_GB"]),
                predicted=most,
                setup=setup,
                machine=machine,
            )


def large_vocabularies(folder: Path = REFERENCE) -> Iterator[Row]:
    """Of the same authors (arXiv 2411.05288): 1F1B on one node, and with layers moved away from the last stage.

    Their utilisation is by Megatron's formula, in which attention is not causal. A last stage with more to do for its
    vocabulary than others for their layers has none.
    """
    machine = read_machine("a100-80gb")
    for row in read("vocabulary_parallelism_a100", folder):
        layers = int(row["layers"])
        hidden = int(row["hidden"])
        length = int(row["seq_length"])
        vocabulary = int(row["vocab"])
        ranks = int(row["pp"])
        batch = int(row["num_microbatches"])
        model = gpt(layers, hidden, int(row["heads"]), vocabulary)
        setup = PaperSetup(model, length, batch, placement=Placement(ranks))
        if row["method"] == "redis":
            setup = replace(setup, layers_per_stage=balanced_layers(setup, setup.placement, machine, least=0))
        flops = 72 * batch * length * layers * hidden**2 * (1 + length / 6 / hidden + vocabulary / 12 / layers / hidden)
        published = flops / (float(row["mfu_pct"]) / 100 * ranks * machine.device.peak_flops)
        label = f"{row['method']}, vocabulary {vocabulary}, {length} tokens"
        seconds = predict(setup, machine).seconds
        yield Row(
            table="Large vocabularies",
            label=label,
            unit="s",
            published=published,
            predicted=seconds,
            setup=setup,
            machine=machine,
        )
