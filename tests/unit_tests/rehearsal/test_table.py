"""What a rehearsal prints and writes."""

import json
from dataclasses import replace

import pytest

from megatron.seq1f1b.planning.costs.machine import bytes_outside
from megatron.seq1f1b.rehearsal.ledger import Category, Moment
from megatron.seq1f1b.rehearsal.recorder import Message, Traffic
from megatron.seq1f1b.rehearsal.report import GIB, RehearsalReport, StageReport, as_text
from megatron.seq1f1b.report import plot_memory

MOMENT = "in the forward of stage 0 for segment 0 of micro-batch 0"


def stage(rank, gib, traffic):
    moments = [
        Moment("step begins", {Category.WEIGHTS: GIB}, GIB),
        Moment(f"{rank}F0.0", {Category.WEIGHTS: GIB, Category.ACTIVATIONS: gib * GIB}, GIB),
        Moment(f"{rank}B0.0", {Category.WEIGHTS: GIB, Category.TEMPORARY: GIB // 2}, GIB),
    ]
    return StageReport(rank, (rank,), 8, 3 * 10**9, moments, traffic, 3, 1000, 1.0)


def report(gib=10, received_shape=(4, 1, 8)):
    sent = Message(0, 1, "forward", (4, 1, 8), "bfloat16", 64, "0F0.0")
    traffic = Traffic([sent], []), Traffic([], [sent._replace(shape=received_shape)])
    return RehearsalReport("a launch", 80 * GIB, (stage(0, gib, traffic[0]), stage(1, 5, traffic[1])), ("one thing",))


def test_what_fits():
    text = as_text(report())
    needed = 11 + bytes_outside(3) / GIB
    assert f"Memory: fits. Pipeline rank 0 needs most: {needed:.1f} GiB of 80 GiB, {MOMENT}; " in text
    assert "Messages: 1 on 1 channel, the largest of 0.1 KiB; both ends of each agree" in text
    assert "0F0.0" in text and "one thing." in text and "keys and values" not in text
    assert report().problems == []


def test_the_columns_are_aligned():
    lines = as_text(report()).splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("──"))
    assert {len(line) for line in lines[rule - 1 : rule + 3]} == {len(lines[rule])}


def test_what_does_not_fit_is_a_problem():
    too_much = report(gib=90)
    text = as_text(too_much)
    assert (
        f"Over 80 GiB: pipeline rank 0. Rank 0 needs most: 91.9 GiB, {MOMENT}, of which activations 90.0 GiB." in text
    )
    assert too_much.problems == [f"pipeline rank 0 needs more than the 80 GiB of --device-memory: 91.9 GiB, {MOMENT}"]


def test_several_ranks_that_do_not_fit_are_one_problem():
    full = report(gib=90)
    full = replace(full, stages=(full.stages[0], replace(full.stages[0], rank=1)))
    *_, problem = full.problems
    assert problem == (
        f"pipeline ranks 0 and 1 need more than the 80 GiB of --device-memory, rank 0 most: 91.9 GiB, {MOMENT}"
    )


def test_ends_that_disagree_are_a_problem():
    wrong = report(received_shape=(2, 1, 8))
    assert "but received as" in as_text(wrong) and len(wrong.problems) == 1


def test_json_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    data = json.loads(json.dumps(report().as_json()))
    assert data["fits"] and data["pipeline_ranks"][0]["fullest"]["peak"] == {"weights": GIB, "activations": 10 * GIB}
    plot_memory(data, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000
