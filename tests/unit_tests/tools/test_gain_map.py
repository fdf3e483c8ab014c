"""The map of gains of `seq1f1b gain-map`, and gains in words."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands import gain_map
from megatron.seq1f1b.commands.plan_text import Gain
from megatron.seq1f1b.planning.planner.search import Search
from unit_tests.planning.planner.question import MODEL

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


def test_a_map_is_continued_where_it_was_left(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    computed = []

    def of_small(asked):
        computed.append((round(asked.machine.network.bandwidth / 1e9), asked.num_devices, asked.global_batch_size))
        return Search(replace(asked, model=MODEL, chunks=(1,), micro_batches=(1,), segments=(1, 2)))

    monkeypatch.setattr(gain_map, "Search", of_small)
    output = tmp_path / "gains.csv"
    gain_map.main([*WORDS.split(), "--output", str(output), "--picture"])
    cells = [(speed, count, batch) for speed in (10, 100) for count in (2, 4) for batch in (2, 4)]
    assert computed[::2] == computed[1::2] == cells
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1 + 8 and " %" in first
    assert output.with_suffix(".png").stat().st_size > 10_000

    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:-1]))
    gain_map.main([*WORDS.split(), "--output", str(output)])
    assert computed[16:] == [(100, 4, 4)] * 2 and capsys.readouterr().out == first


def test_a_file_that_is_no_map_is_left_as_it_is(tmp_path):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="exists and is no map of gains; name another file"):
        gain_map.main([*WORDS.split(), "--output", str(tmp_path / "mine.csv")])
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"
