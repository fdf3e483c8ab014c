"""The command `seq1f1b plan`: what a user sees."""

import pytest

from megatron.seq1f1b import commands

SMALL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --seq-length 8192 --global-batch-size 4"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    import contextlib
    import io

    picture = tmp_path_factory.mktemp("plan") / "frontier.png"
    output = io.StringIO()
    launch = f"{SMALL} --best 2 --explain --output {picture} --pipeline-model-parallel-size 4 --lr 1e-4"
    with contextlib.redirect_stdout(output):
        assert commands.main(["plan", *launch.split()]) == 0
    assert picture.stat().st_size > 10_000
    return output.getvalue()


def test_the_best_the_memory_and_the_flags_are_shown(printed):
    assert "tokens/s" in printed and "rank  0" in printed and "Where the time goes" in printed
    flags = printed[printed.index("Flags of the best:") :]
    assert "--lr 1e-4" in flags and "--num-layers 8" in flags and flags.count("--global-batch-size") == 1


def test_the_launch_itself_is_predicted_as_it_is(printed):
    assert "as given" in printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--gpus 4 --seq-length 8192 --global-batch-size 4", "--num-layers is missing"),
        ("--model 13b --gpus 4 --global-batch-size 4", "--seq-length is missing"),
        ("--model 13b --gpus 4 --seq-length 8192 --global-batch-size 4 --machine tpu", "--machine tpu"),
        ("--model gpt-1t --gpus 8 --seq-length 8192 --global-batch-size 8", "it would with --gpus "),
        (f"{SMALL} --rehearse nothing.py", "--rehearse nothing.py: there is no such script; name your own"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    assert commands.main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
