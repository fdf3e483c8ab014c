"""Wrappers of functions of Megatron's training loop."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException

from megatron.seq1f1b.cpu.redirects import REDIRECTS
from megatron.seq1f1b.process.patches import patched
from megatron.seq1f1b.runtime import training_loop
from megatron.seq1f1b.runtime.segmentation import Apart
from megatron.seq1f1b.runtime.training_loop import TrainingLoop


def loop(documents=None, **args) -> TrainingLoop:
    return TrainingLoop(lambda: Namespace(**args), lambda: SimpleNamespace(documents=lambda: documents))


@pytest.mark.parametrize(
    "log_interval, iteration, prints_besides", [(1, 1, False), (1, 8, False), (10, 1, True), (10, 30, False)]
)
def test_the_first_iteration_is_printed_within_an_interval(log_interval, iteration, prints_besides):
    """Megatron keeps a loss that it printed early for the next line, which would show the mean of both."""
    seen = []

    def upstream(*_, is_first_iteration):
        seen.append(is_first_iteration)

    loop(log_interval=log_interval).training_log(upstream, {}, {}, 0.1, iteration, is_first_iteration=True)
    assert seen == [prints_besides]


def test_documents_and_micro_batches_are_those_of_the_step(alone, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda: torch.distributed.group.WORLD)
    apart = Apart.of(4, [3, 5, 1])
    for documents, counted, scale in ((None, (7.0, 50.0), 0.5), (apart, (9.0, 35.0), 0.25)):
        found = loop(documents)
        assert found.count_documents(lambda: (7.0, 50.0)) == counted
        assert found.report_experts(lambda tracker, scale, iteration: (scale, iteration), None, 0.5, 3) == (scale, 3)


def test_without_a_folder_nothing_is_saved(caplog):
    loop(save=None).save(pytest.fail, 7)
    assert caplog.messages == ["nothing is saved of iteration 7, since --save is not given"]


def failing(error):
    def upstream(*_, **__):
        raise error

    return upstream


def test_a_failed_save_names_the_last_one_and_the_space(tmp_path):
    """torch raises a CheckpointException, which is no Exception and names no disk."""
    for before in ("no checkpoint is complete yet", "the last complete checkpoint is of iteration 4"):
        with pytest.raises(CheckpointException) as error:
            loop(save=str(tmp_path)).save(failing(CheckpointException("write", {})), 6)
        assert error.value.__notes__[0].startswith(
            f"the checkpoint of iteration 6 was not saved; {before}; {tmp_path} has "
        )
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")


def test_a_checkpoint_at_which_megatron_exits_is_an_error():
    with pytest.raises(RuntimeError, match="cannot load /saved; what it printed last is the reason"):
        loop(load="/saved").load(failing(SystemExit()))


@pytest.mark.parametrize("redirects, how", [((), "spawn"), (REDIRECTS, "fork")], ids=["GPU", "CPU"])
def test_what_starts_the_process_that_writes_checkpoints(monkeypatch, redirects, how):
    """On a CPU a new Python would import Megatron and the training script for the first save of every rank."""
    found = []

    class Manager:
        def __init__(self, ctx):
            found.append(ctx.get_start_method())

        def start(self, initializer):
            assert callable(initializer)

        def Queue(self):
            return "a queue"

    monkeypatch.setattr(training_loop, "SyncManager", Manager)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    name = "get_write_results_queue"
    upstream = getattr(filesystem_async, name)  # which a program that a test installed may have redirected
    monkeypatch.setattr(filesystem_async, name, getattr(upstream, "func", upstream))
    with patched([row for row in (*redirects, *loop().patches()) if row.target.endswith(name)]):
        assert filesystem_async.get_write_results_queue() == "a queue"
    assert found == [how]
