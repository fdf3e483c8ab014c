"""What is put around Megatron's training loop."""

import errno
import shutil
from argparse import Namespace
from collections import namedtuple

import pytest
from torch.distributed.checkpoint import CheckpointException

from megatron.seq1f1b.startup.training_loop import TrainingLoop, is_full


def loop(**args) -> TrainingLoop:
    return TrainingLoop(lambda: Namespace(**args), lambda: None, lambda: None)


@pytest.mark.parametrize(
    "log_interval, iteration, prints_besides", [(1, 1, False), (1, 8, False), (10, 1, True), (10, 30, False)]
)
def test_the_first_iteration_is_printed_within_an_interval(log_interval, iteration, prints_besides):
    """Megatron keeps what it has printed besides for the next line, which would be the mean of both."""
    seen = []

    def upstream(*_, is_first_iteration):
        seen.append(is_first_iteration)

    loop(log_interval=log_interval).training_log(upstream, {}, {}, 0.1, iteration, is_first_iteration=True)
    assert seen == [prints_besides]


def test_without_a_folder_nothing_is_saved(caplog):
    loop(save=None).save(pytest.fail, 7)
    assert caplog.messages == ["nothing is saved of iteration 7, since --save is not given"]


def failing(error):
    def upstream(*_, **__):
        raise error

    return upstream


def test_a_full_disk_names_the_last_complete_checkpoint(tmp_path, monkeypatch, capsys):
    """torch raises a CheckpointException, which is no Exception and names no disk."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 2**20))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(SystemExit):
        loop(save=str(tmp_path)).save(failing(CheckpointException("write", {})), 6)
    error = capsys.readouterr().err
    assert error.startswith("error: no space is left on /")
    assert error.endswith(" for the checkpoint of iteration 6; the last complete checkpoint is of iteration 4.\n")


def test_a_failed_save_keeps_its_error_and_names_the_last_one(tmp_path):
    with pytest.raises(RuntimeError) as error:
        loop(save=str(tmp_path)).save(failing(RuntimeError("the file system is gone")), 6)
    assert error.value.__notes__ == ["the checkpoint of iteration 6 was not saved; no checkpoint is complete yet"]


def test_nested_errors_of_a_full_disk_are_recognised(tmp_path):
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as cause:
            raise RuntimeError("unexpected pos 704 vs 598") from cause
    except RuntimeError as error:
        assert is_full(tmp_path, error)
    assert not is_full(tmp_path, RuntimeError("unexpected pos 704 vs 598"))
