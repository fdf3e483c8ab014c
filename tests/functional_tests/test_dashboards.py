"""What a run shows: the block at its start, its lines, TensorBoard and wandb."""

import re

import pytest

from support.launch import TINY_GPT

PIPELINE = [*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2", "--train-iters", "3", "--log-throughput"]


def test_every_iteration_shows_what_segments_gain(launch, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = [*PIPELINE, "--sequence-splits", "4", "--tensorboard-dir", tmp_path / "board"]
    flags += ["--wandb-project", "seq1f1b", "--wandb-exp-name", "tiny", "--wandb-save-dir", tmp_path]
    log = launch(2, flags, env={"WANDB_MODE": "offline"}).check().log

    assert log.count("-- sequence-level pipeline parallelism") == 1
    assert re.search(r"segments +4, balanced: \d+ \d+ \d+ \d+ tokens", log)
    assert re.search(r"^ *schedule +1f1b with segments$", log, re.MULTILINE)
    assert "in-flight microbatches" not in log and "TFLOP/s/GPU): 0.0" not in log
    lines = [line for line in log.splitlines() if re.search(r" iteration +\d+/ +3 \|", line)]
    assert len(lines) == 3
    for line in lines:
        idle = re.search(r"idle by pipeline rank \(%\): (\S+) (\S+) \|", line)
        assert all(0 < float(share) < 100 for share in idle.groups())
        assert float(re.search(r"tokens/s per process: (\S+) \|", line)[1]) > 0
        assert re.search(r"peak activations by pipeline rank \(MB\): \S+ \S+ \|", line)
        assert re.search(r"throughput per process \(GFLOP/s\): \S+ \|", line)
    for allocated, most in re.findall(r"\| allocated: (\S+) \| max allocated: (\S+) \|", log):
        assert float(allocated) <= float(most)

    board = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name in ("tokens-per-second-per-gpu", "idle-share", "idle-share/pipeline-rank-1", "lm loss"):
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3]
    assert board.Scalars("peak-activation-bytes/pipeline-rank-0")[-1].value > 0
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_megatrons_own_schedule_keeps_its_estimates(launch):
    log = launch(2, PIPELINE).check().log
    assert "Number of in-flight microbatches" in log and "-- sequence-level pipeline parallelism" not in log
    assert len(re.findall(r"tokens/s per process: \S+ \|", log)) == 3 and "idle by" not in log
