"""The command `seq1f1b train-time`: what a user sees."""

from contextlib import suppress

import pytest

from megatron.seq1f1b import commands

SMALL = "--parameters 1e8 --tokens 1e9 --seq-length 2048 --gpus 1"


def test_the_table_the_law_and_the_flags_are_shown(capsys):
    words = f"{SMALL} --gpu-hour 2 --critical-batch-size 65536"
    assert commands.main(["train-time", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "Largest batch: 0.0655 million tokens (as given; tokens by arXiv 2410.21676" in printed
    assert "GPU hours" in printed and "cost" in printed and "--micro-batch-size" in printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--model 12b --tokens 1e9 --gpus 1", "--model 12b is unknown"),
        ("--tokens 0 --model 7b --gpus 1", "is not a number above 0"),
        ("--tokens 1e9 --model 7b --gpus 1000000000", "--gpus: '1000000000' is more than 1000000"),
        (f"{SMALL} --critical-batch-law x", "--critical-batch-law: invalid choice: 'x' (choose from"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    with suppress(SystemExit):
        assert commands.main(["train-time", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
