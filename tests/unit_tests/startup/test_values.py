"""Numbers with which no training can run end in a sentence, and those of good launches do not."""

import argparse

import pytest

from megatron.seq1f1b.startup.values import unusable_value


def parser() -> argparse.ArgumentParser:
    """A few of Megatron's flags, with its types and defaults."""
    flags = argparse.ArgumentParser()
    for name, kind, default in (
        ("num-layers", int, None),
        ("num-attention-heads", int, 4),
        ("num-query-groups", int, 1),
        ("num-experts", int, None),
        ("moe-router-topk", int, 2),
        ("train-iters", int, 9),
        ("lr-warmup-iters", int, 0),
        ("lr-wsd-decay-iters", int, None),
        ("lr-warmup-fraction", float, None),
        ("lr", float, 1.0),
        ("lr-warmup-init", float, 0.0),
        ("clip-grad", float, 1.0),
        ("attention-dropout", float, 0.1),
        ("rotary-percent", float, 1.0),
        ("glu-linear-offset", float, 0.0),
        ("null-tokenizer-pad-id", int, -1),
        ("seq-length", int, 64),
        ("tensor-model-parallel-size", int, 1),
        ("pipeline-model-parallel-size", int, 1),
        ("num-virtual-stages-per-pipeline-rank", int, None),
        ("decoder-first-pipeline-num-layers", int, None),
        ("ckpt-step", int, None),
    ):
        flags.add_argument(f"--{name}", type=kind, default=default)
    flags.add_argument("--rampup-batch-size", type=int, nargs=3)
    flags.add_argument("--group-query-attention", action="store_true")
    flags.add_argument("--sequence-parallel", action="store_true")
    flags.add_argument("--lr-decay-style", default="linear")
    flags.add_argument("--lr-wsd-decay-samples")
    flags.add_argument("--wandb-project")
    flags.add_argument("--wandb-exp-name")
    flags.add_argument("--load")
    flags.add_argument("--skip-train", action="store_true")
    return flags


def sentence(words: str) -> str | None:
    megatrons = parser()
    actions = tuple(megatrons._actions)
    megatrons.add_argument("--of-a-script", type=float)
    return unusable_value(megatrons.parse_args(words.split()), actions)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--num-layers 0", "--num-layers 0 must be at least 1"),
        ("--train-iters -3", "--train-iters -3 must be at least 0"),
        ("--rampup-batch-size 4 0 100", "--rampup-batch-size 0 must be at least 1"),
        ("--attention-dropout 2", "--attention-dropout 2.0 must be at least 0 and below 1"),
        ("--attention-dropout nan", "--attention-dropout nan must be a finite number"),
        ("--rotary-percent 0", "--rotary-percent 0.0 must be above 0"),
        ("--rotary-percent 2", "--rotary-percent 2.0 must be between 0 and 1"),
        ("--lr inf", "--lr inf must be a finite number"),
        ("--clip-grad nan", "--clip-grad nan must be a finite number"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-query-groups 3 must divide --num-attention-heads 4",
        ),
        ("--num-experts 4 --moe-router-topk 9", "--moe-router-topk 9 must be at most --num-experts 4"),
        (
            "--num-layers 4 --decoder-first-pipeline-num-layers 9",
            "--decoder-first-pipeline-num-layers 9 must be at most --num-layers 4",
        ),
        ("--lr-warmup-iters 9", "--lr-warmup-iters 9 must be below --train-iters 9"),
        ("--lr-wsd-decay-iters 10", "--lr-wsd-decay-iters 10 must be at most --train-iters 9"),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0 leaves no step"),
        ("--lr-warmup-init 2", "--lr-warmup-init 2.0 must be at most --lr 1.0"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters or"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
            "with --sequence-parallel --tensor-model-parallel-size 2 must divide --seq-length 63",
        ),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "--num-layers 4 does not fill --num-virtual-stages-per-pipeline-rank 3 on each of",
        ),
        ("--ckpt-step 5", "--ckpt-step 5 needs --load"),
        ("--wandb-project p", "--wandb-project needs --wandb-exp-name"),
        ("--wandb-project p --wandb-exp-name e", "--wandb-project needs --wandb-save-dir or --save"),
    ],
)
def test_what_cannot_be_meant(words, expected):
    found = sentence(words)
    assert found is not None and found.startswith(expected)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--train-iters 0",
        "--clip-grad inf",
        "--glu-linear-offset -1",
        "--null-tokenizer-pad-id -7",
        "--of-a-script -5",
        "--of-a-script nan",
        "--num-query-groups 3",  # without --group-query-attention, Megatron does not look at it
        "--num-experts 2",
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        "--lr-decay-style WSD --lr-wsd-decay-iters 9",
        "--skip-train --train-iters 0 --lr-warmup-iters 5",
    ],
)
def test_what_can_be_meant(words):
    assert sentence(words) is None
