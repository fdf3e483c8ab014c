"""The comparison of splits: every strategy in one table, and the picture."""

import pytest

from megatron.seq1f1b.commands import run
from support.partition_profile import write_example

MODEL = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "8", "--vocab-size", "1024"]
SMALL = [*MODEL, "--seq-length", "16384"]
PIPELINE = ["--sequence-splits", "4", "--pipeline-model-parallel-size", "4", "--num-microbatches", "4"]


def rows(text):
    """Name of each strategy to (segments, imbalance, step, bubble)."""
    table = text.split("\n\n")[0].splitlines()[1:]
    found = {}
    for line in table:
        name, numbers = line[:16].strip(), line[16:].split()
        found[name] = int(numbers[0]), float(numbers[1]), float(numbers[2]), float(numbers[3])
    return found


def test_balance_shows_in_the_predicted_step(capsys):
    assert run("plan-split", [*SMALL, *PIPELINE]) == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == ["even", "uniform_comp", "balanced", "terapipe", "terapipe, free"]
    for better, worse in (("balanced", "uniform_comp"), ("uniform_comp", "even")):
        assert all(x < y for x, y in zip(found[better][1:], found[worse][1:], strict=True)), (better, worse)
    assert found["terapipe, free"][0] > 4 and found["terapipe, free"][2] < found["terapipe"][2]


def test_a_file_and_a_profile_take_part(capsys, tmp_path):
    lengths, profile = tmp_path / "mine", tmp_path / "profile.json"
    lengths.write_text("8192 4096 4096")
    write_example(profile)
    shape = ["--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--vocab-size", "512"]
    flags = ["--seq-length", "16384", "--sequence-split-file", str(lengths), "--sequence-split-profile", str(profile)]
    assert run("plan-split", [*shape, *PIPELINE, *flags]) == 0
    output = capsys.readouterr().out
    assert "Measured on a device; fit off by 0.0 %" in output
    found = rows(output.split("\n\n", 1)[1])
    assert "profile" in found and "balanced" not in found and found["mine"][0] == 3


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "splits.png"
    assert run("plan-split", [*SMALL, *PIPELINE, "--output", str(path)]) == 0
    assert path.stat().st_size > 10_000


def test_bad_input_is_one_sentence(capsys, tmp_path):
    lengths = tmp_path / "lengths"
    lengths.write_text("1 2 3")
    assert run("plan-split", [*SMALL, *PIPELINE, "--sequence-split-file", str(lengths)]) == 2
    assert "add up to 6, not to --seq-length 16384" in capsys.readouterr().err
