"""The command `seq1f1b gain-map`, and gains in words."""

from dataclasses import replace

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands import gain_map
from megatron.seq1f1b.planning.planner import Gain, gain
from unit_tests.planning.planner.question import MODEL, small

WORDS = "--model llama3-8b --seq-length 8192 --machine a100-80gb --gpus 2 4 --tokens 16384 32768 --bandwidths 10 100"


@pytest.mark.parametrize(
    "ours, megatron, words",
    [
        (1.0, 1.5, "+50.0 %"),
        (1.0, 1.05, "+5.0 % (within error)"),
        (1.0, 0.8, "-20.0 %"),
        (1.0, None, "only segments fit"),
        (None, 1.0, "only Megatron's own fit"),
        (None, None, "nothing fits"),
    ],
)
def test_a_gain_below_the_error_is_printed_as_such(ours, megatron, words):
    assert str(Gain(ours, megatron, 0.08)) == words


def test_megatron_alone_takes_part_with_whole_sequences():
    question = small(num_devices=4, chunks=(1, 2))
    found, ours, megatron = gain(question)
    setup = megatron.candidate.setup
    assert (setup.segments, setup.family, setup.keeps_logits) == ((8192,), "1f1b", True)
    assert found.value == megatron.prediction.seconds / ours.prediction.seconds - 1 >= 0
    # Without a way to cut sequences, nothing is left to gain.
    whole, *_ = gain(replace(question.of_megatron(), by_megatron=False))
    assert whole.value == 0 and "within error" in str(whole)


def test_a_map_is_continued_where_it_was_left(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    computed = []

    def of_small(asked):
        computed.append((round(asked.machine.network.bandwidth / 1e9), asked.num_devices, asked.global_batch_size))
        sizes = dict(num_devices=asked.num_devices, global_batch_size=asked.global_batch_size, chunks=(1,))
        return gain(small(model=MODEL, machine=asked.machine, **sizes))

    monkeypatch.setattr(gain_map, "gain", of_small)
    output = tmp_path / "gains.csv"
    assert commands.main(["gain-map", *WORDS.split(), "--output", str(output), "--picture"]) == 0
    assert computed == [(speed, count, batch) for speed in (10, 100) for count in (2, 4) for batch in (2, 4)]
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1 + 8 and " %" in first
    assert output.with_suffix(".png").stat().st_size > 10_000

    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:-1]))
    assert commands.main(["gain-map", *WORDS.split(), "--output", str(output)]) == 0
    assert computed[8:] == [(100, 4, 4)] and capsys.readouterr().out == first


def test_a_file_that_is_no_map_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    assert commands.main(["gain-map", *WORDS.split(), "--output", str(tmp_path / "mine.csv")]) == 2
    assert "is there and no map of gains; name another file" in capsys.readouterr().err
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"
