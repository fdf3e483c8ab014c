"""What else of Megatron's training loop meets our schedules: dropout, batches that grow, timers."""

import re

import pytest

from support.launch import TINY_GPT

PIPELINE = (*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2")
SEGMENTS = ("--sequence-splits", "4")
DROPOUT = ("--hidden-dropout", "0.2")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

NAMES = (
    *("forward-backward", "forward-compute", "backward-compute", "batch-generator"),
    *("forward-recv", "forward-send", "backward-recv", "backward-send"),
)


def without(flags: tuple, *names: str) -> list:
    """The flags without those that have these names, and without their values."""
    places = [flags.index(name) for name in names]
    return [flag for index, flag in enumerate(flags) if index not in places and index - 1 not in places]


@pytest.fixture(scope="module")
def dropped(launch):
    return launch(2, [*PIPELINE, *SEGMENTS, *DROPOUT]).check()


def test_the_seed_decides_what_is_dropped_out(launch, dropped):
    assert launch(2, [*PIPELINE, *SEGMENTS, *DROPOUT]).check().losses() == dropped.losses()
    other = launch(2, [*PIPELINE, *SEGMENTS, *DROPOUT, "--seed", "5"]).check()
    assert other.losses() != dropped.losses()


def test_recomputation_drops_out_the_same(launch, dropped):
    assert launch(2, [*PIPELINE, *SEGMENTS, *DROPOUT, *RECOMPUTE]).check().losses() == dropped.losses()


def test_an_evaluation_drops_out_nothing(launch):
    """With weights that do not move."""
    still = [*without(PIPELINE, "--lr"), "--lr", "1e-12", "--train-iters", "1", "--eval-iters", "2", *SEGMENTS]
    with_dropout, without_dropout = (launch(2, [*still, *flags]).check() for flags in (DROPOUT, ()))
    assert with_dropout.losses("lm loss value") == without_dropout.losses("lm loss value") != []
    assert with_dropout.losses() != without_dropout.losses()
    assert with_dropout.losses() == pytest.approx(without_dropout.losses(), rel=0.1)


def test_a_batch_that_grows_and_another_one_in_evaluation(launch):
    """Two, then four micro-batches; three of one sequence in an evaluation. Megatron's log finds its timers."""
    flags = without(PIPELINE, "--global-batch-size", "--train-iters", "--eval-iters")
    flags += ["--train-samples", 24, "--step-batch-size-schedule", "0:4 512:8"]
    flags += ["--eval-interval", 2, "--eval-iters", 2, "--eval-micro-batch-size", 1, "--eval-global-batch-size", 3]
    own = launch(2, [*flags, "--attention-backend", "local"]).check()
    ours = launch(2, [*flags, *SEGMENTS, "--timing-log-level", 2, "--timing-log-option", "all"]).check()
    assert re.findall(r"global batch size: +(\d+)", ours.log) == ["4", "4", "8", "8"]
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)
    assert ours.losses("lm loss value") == pytest.approx(own.losses("lm loss value"), abs=1e-5) != []
    for name in NAMES:
        assert re.search(rf"^ +{name}:$", ours.log, re.MULTILINE), name


def test_a_run_with_a_signal_handler_and_data_workers_ends(launch):
    """The workers ignore SIGTERM: they end with the iterator of the last step, which nothing may keep."""
    flags = [*without(PIPELINE, "--num-workers"), "--num-workers", "2", "--exit-signal-handler"]
    launch(2, [*flags, *SEGMENTS]).check()
