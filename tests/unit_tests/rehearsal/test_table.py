"""What a rehearsal prints and writes; both ends of a channel agree on the messages, or a sentence names both."""

import json
from dataclasses import replace

import pytest

from megatron.seq1f1b.planning.costs.machine import GIB, bytes_outside
from megatron.seq1f1b.rehearsal.ledger import Category, Moment
from megatron.seq1f1b.rehearsal.report import Message, RehearsalReport, StageReport, mismatches
from megatron.seq1f1b.report import plot_memory

MOMENT = "in the forward of stage 0 for segment 0 of micro-batch 0"


def stage(rank, gib, sent, received):
    moments = [
        Moment("step begins", {Category.WEIGHTS: GIB}, GIB),
        Moment(f"{rank}F0.0", {Category.WEIGHTS: GIB, Category.ACTIVATIONS: gib * GIB}, GIB),
        Moment(f"{rank}B0.0", {Category.WEIGHTS: GIB, Category.TEMPORARY: GIB // 2}, GIB),
    ]
    return StageReport(rank, [rank], 8, 3 * 10**9, moments, sent, received, bytes_outside(3))


def report(gib=10, received_shape=(4, 1, 8)):
    sent = Message(0, 1, "forward", (4, 1, 8), "bfloat16", 64, "0F0.0")
    stages = [stage(0, gib, [sent], []), stage(1, 5, [], [replace(sent, shape=received_shape)])]
    return RehearsalReport("a launch", 80 * GIB, stages, ["one thing"])


def test_what_fits():
    text = report().as_text()
    needed = 11 + bytes_outside(3) / GIB
    assert (
        f"Memory: fits. Pipeline rank 0 needs most: {needed:.1f} GiB, {MOMENT}; {80 - needed:.1f} GiB of 80 GiB "
        in text
    )
    assert "Messages: 1 on 1 channel, the largest of 64.0 bytes; both ends of each agree" in text
    assert "0F0.0" in text and "one thing." in text and "keys and values" not in text
    assert report().problems == []


def test_the_columns_are_aligned():
    lines = report().as_text().splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("──"))
    assert {len(line) for line in lines[rule - 1 : rule + 3]} == {len(lines[rule])}


MOST = f"91.9 GiB, {MOMENT}, of which activations 90.0 GiB"


@pytest.mark.parametrize(
    "num_full, sentence",
    [
        (1, f"pipeline rank 0 needs more than the 80 GiB of --device-memory: {MOST}"),
        (2, f"pipeline ranks 0 and 1 need more than the 80 GiB of --device-memory, rank 0 most: {MOST}"),
    ],
)
def test_what_does_not_fit_is_one_problem(num_full, sentence):
    full = report(gib=90)
    full = replace(full, stages=[full.stages[0], replace(full.stages[num_full == 1], rank=1)])
    *_, problem = full.problems
    assert problem == sentence and f"Memory: {sentence}." in full.as_text()


def test_ends_that_disagree_are_a_problem():
    wrong = report(received_shape=(2, 1, 8))
    assert "but received as" in wrong.as_text() and len(wrong.problems) == 1


def test_json_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    data = json.loads(json.dumps(report().as_json()))
    assert data["fits"] and data["pipeline_ranks"][0]["fullest"]["peak"] == {"weights": GIB, "activations": 10 * GIB}
    plot_memory(data, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000


def message(source=0, destination=1, shape=(4, 1, 8), dtype="bfloat16", moment="0F0.0"):
    return Message(source, destination, "forward", shape, dtype, 64, moment)


SHORT = message(shape=(2, 1, 8))


def test_ends_that_agree():
    assert mismatches([message(), SHORT], [message(), SHORT]) == []


@pytest.mark.parametrize(
    "sent, received, other",
    [
        ([message(), SHORT], [SHORT, message()], "bfloat16 [2, 1, 8]"),
        ([message()], [message(dtype="float32")], "float32 [4, 1, 8]"),
    ],
    ids=["order", "type"],
)
def test_what_is_received_as_another_is_found(sent, received, other):
    (sentence,) = mismatches(sent, received)
    assert f"message 0 from rank 0 to rank 1 (forward) is sent as bfloat16 [4, 1, 8] {MOMENT}, but" in sentence
    assert f"but received as {other} " in sentence


@pytest.mark.parametrize(
    "sent, received, numbers, first",
    [
        ([message(), message(moment="0F1.0")], [message()], "2 messages are sent", "micro-batch 1"),
        ([], [message()], "0 messages are sent", "micro-batch 0"),
    ],
    ids=["nobody receives", "nobody serves"],
)
def test_a_message_without_a_partner_is_found(sent, received, numbers, first):
    (sentence,) = mismatches(sent, received)
    assert sentence == (
        f"{numbers} from rank 0 to rank 1 (forward), but 1 received; the first without a partner is bfloat16 "
        f"[4, 1, 8] in the forward of stage 0 for segment 0 of {first}"
    )
