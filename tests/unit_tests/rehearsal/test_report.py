"""What a rehearsal prints and writes; both ends of a channel agree on the messages, or a sentence names both."""

import json
from dataclasses import replace

import pytest

from megatron.seq1f1b.costs.machine import GIB, bytes_outside
from megatron.seq1f1b.rehearsal.ledger import Category, MessageEnd, Moment
from megatron.seq1f1b.rehearsal.report import RehearsalReport, StageReport, mismatches
from megatron.seq1f1b.report import plot_memory

MOMENT = "in the forward of stage 0 for segment 1 of micro-batch 3"


def stage(rank, gib, sent, received):
    moments = [
        Moment("start of the step", {Category.WEIGHTS: GIB}, GIB),
        Moment(f"{rank}F3.1", {Category.WEIGHTS: GIB, Category.ACTIVATIONS: gib * GIB}, GIB),
        Moment(f"{rank}B3.1", {Category.WEIGHTS: GIB, Category.TEMPORARY: GIB // 2}, GIB),
    ]
    return StageReport(rank, [rank], 3 * 10**9, moments, sent, received, bytes_outside(3))


def message(destination=1, shape=(4, 1, 8), dtype="bfloat16"):
    return MessageEnd(0, destination, "forward", shape, dtype, 64, "0F3.1")


def report(gib=10, num_full=1):
    sent = message()
    stages = [stage(0, gib, [sent], []), stage(1, 5, [], [sent])]
    if num_full == 2:
        stages[1] = replace(stages[1], moments=stages[0].moments)
    return RehearsalReport("a launch", 80 * GIB, stages, ["one thing"])


def test_what_fits():
    text, needed = report().as_text(), 11 + bytes_outside(3) / GIB
    most = f"{needed:.1f} GiB on pipeline rank 0, {MOMENT}, 10.0 GiB of it activations"
    assert f"Memory: fits. At most {most}; {80 - needed:.1f} GiB of 80 GiB stay free." in text
    assert "Messages: 1 on 1 channel, the largest of 64.0 bytes; both ends of each agree" in text
    assert "0F3.1" in text and "one thing." in text and "keys and values" not in text
    assert report().problems == []
    lines = text.splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("──"))
    assert {len(line) for line in lines[rule - 1 : rule + 3]} == {len(lines[rule])}, "columns are aligned"


@pytest.mark.parametrize("num_full", [1, 2])
def test_what_does_not_fit_is_one_problem(num_full):
    full = report(gib=90, num_full=num_full)
    (problem,) = full.problems
    assert problem == (
        f"the 80 GiB of --device-memory are too few for {num_full} of 2 pipeline ranks: 91.9 GiB on pipeline rank 0, "
        f"{MOMENT}, 90.0 GiB of it activations"
    )
    assert f"Memory: {problem}." in full.as_text() and full.as_text().count(" ! ") == num_full


def test_json_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    data = json.loads(json.dumps(report().as_json()))
    assert data["fits"] and data["pipeline_ranks"][0]["fullest"]["peak"] == {"weights": GIB, "activations": 10 * GIB}
    plot_memory(data, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000


SHORT = message(shape=(2, 1, 8))
BETWEEN = "from rank 0 to rank 1 (forward)"
OTHER = f"message 0 {BETWEEN} is sent as bfloat16 [4, 1, 8] {MOMENT}, but received as "
ALONE = f"{BETWEEN}, but 1 received; the first without a partner is bfloat16 [4, 1, 8] {MOMENT}"


@pytest.mark.parametrize(
    "sent, received, found",
    [
        ([message(), SHORT], [message(), SHORT], []),
        ([message(), SHORT], [SHORT, message()], [f"{OTHER}bfloat16 [2, 1, 8] {MOMENT}"]),
        ([message()], [message(dtype="float32")], [f"{OTHER}float32 [4, 1, 8] {MOMENT}"]),
        ([SHORT, message()], [SHORT], [f"2 messages are sent {ALONE}"]),
        ([], [message()], [f"0 messages are sent {ALONE}"]),
        ([SHORT], [message(2), SHORT], ["0 messages are sent " + ALONE.replace("rank 1", "rank 2")]),
    ],
    ids=["they agree", "order", "type", "nobody receives", "nobody sends", "another rank"],
)
def test_what_both_ends_disagree_on_is_found(sent, received, found):
    assert mismatches(sent, received) == found
