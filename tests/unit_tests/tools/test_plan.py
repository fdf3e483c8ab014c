"""The command `seq1f1b plan`: what a user sees."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands import plan, plan_text
from megatron.seq1f1b.planning.costs.machine import read_machine

PIPELINE = "--pipeline-model-parallel-size 2"
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


def test_where_megatron_alone_does_as_well_it_is_what_to_use(printed):
    assert "Use Megatron's own schedules: they take " in printed and "(within error)." in printed


def test_the_launch_itself_is_predicted_as_it_is(printed):
    assert "as given" in printed and "As given it fits, and takes " in printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--gpus 4 --seq-length 8192 --global-batch-size 4", "--num-layers is missing"),
        ("--model 13b --gpus 4 --seq-length 8192 --global-batch-size 4 --machine tpu", "--machine tpu"),
        ("--model gpt-1t --gpus 8 --seq-length 8192 --global-batch-size 8", "it would with --gpus "),
        (f"{SMALL} --rehearse nothing.py", "--rehearse nothing.py: there is no such script; name your own"),
        (f"{SMALL} --output plan.txt", "expected a name that ends in .png, .svg, .pdf"),
        (f"{SMALL} --output /nope/plan.png", "there is no folder /nope"),
        (f"{SMALL} --num-experts 4 --moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 4"),
        (f"{SMALL} {PIPELINE} --decoder-first-pipeline-num-layers 9", "put [9, -1] layers on 2 pipeline stages"),
        (f"{SMALL} {PIPELINE} --num-virtual-stages-per-pipeline-rank 5", "layers on 10 pipeline stages"),
        (f"{SMALL} {PIPELINE} --sequence-splits 1000000", "these sizes make 8,000,000 actions, the most are 1,000,000"),
        (f"{SMALL} --model 7b", "--model 7b has its own --num-layers; drop one of them"),
        # The parser's own.
        ("--model 13b --gpus 4 --global-batch-size 4", "the following arguments are required: --seq-length"),
        (f"{SMALL} --machne h100-80gb", "--machne is unknown; did you mean --machine?"),
        (f"{SMALL} --bets=3", "--bets is unknown; did you mean --best?"),
        (f"{SMALL} --best 1000000000", "--best: '1000000000' is more than 1000"),
        (f"{SMALL} --num-layers 1000000000", "--num-layers: '1000000000' is more than 10000"),
        (f"{SMALL} --moe-layer-freq [0]*99999999999", "is longer than 10000 layers"),
        (f"{SMALL} --global-batch-size 1000000000", "--global-batch-size: '1000000000' is more than 65536"),
        *((f"{SMALL} --device-memory={wrong}", f"'{wrong}' is not a number above 0") for wrong in ("0", "nan", "much")),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    with suppress(SystemExit):
        assert commands.main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_what_a_prediction_ignores_is_listed_and_comes_back(capsys):
    words = "--gpus 1 --seq-length 2048 --global-batch-size 1 --model 2.7b"
    words += " --lr 1e-4 --foo --fp8-format hybrid --eval-global-batch-size 4"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    flags = printed[printed.index("Flags of the best:") :]
    assert "--lr 1e-4 \\" in flags and "--foo \\" in flags and flags.count("--bf16") == 1
    assert "--fp8-format is not modelled" in flags
    assert "change no prediction: --lr 1e-4, --foo, --fp8-format hybrid, --eval-global-batch-size 4." in flags


def test_the_help_names_what_is_required(capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.main(["plan", "--help"])
    assert "of a sequence; required" in capsys.readouterr().out


def test_plans_with_different_parts_are_explained(monkeypatch):
    parts = iter([{"attention": 1.0}, {"attention": 1.5, "tensor-parallel collectives": 2.0}])
    monkeypatch.setattr(plan_text, "breakdown", lambda prediction: next(parts))
    plans = [SimpleNamespace(prediction=None)] * 2
    lines = plan_text.explained(plans).splitlines()
    assert "  tensor-parallel collectives                    0.0    2000.0   +2000.0" in lines
    assert lines[-1].endswith("spends most of its difference on: tensor-parallel collectives.")


def test_a_rehearsal_has_the_memory_of_the_whole_device(monkeypatch, tmp_path):
    """It takes off what lies outside the allocator itself."""
    script, seen = tmp_path / "pretrain.py", []
    script.write_text("")
    monkeypatch.setattr(
        plan.subprocess, "run", lambda command, env: seen.extend(command) or SimpleNamespace(returncode=0)
    )
    words = f"{SMALL} --best 1 --rehearse {script}"
    assert commands.main(["plan", *words.split()]) == 0
    memory = float(seen[seen.index("--device-memory") + 1])
    assert memory == pytest.approx(read_machine("a100-80gb").device.memory_gib)
