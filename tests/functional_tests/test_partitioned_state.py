"""What a partitioned state moves and holds, measured from outside (that it trains alike: test_seq1f1b_training.py)."""

import json
from pathlib import Path

import pytest

from support.launch import TINY_GPT

WORKER = Path(__file__).parent / "workers" / "state_worker.py"
FLAGS = """
    --mock-data --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule breadth-first
    --seq-length 16 --micro-batch-size 1
"""


def measured(launch, path, *flags):
    """What state_worker.py measured, line by line, rank by rank: two pipeline ranks of two replicas."""
    launch(4, [*TINY_GPT, *FLAGS.split(), *flags], script=WORKER, env={"MEASURED": str(path)}).check()
    return [list(map(json.loads, Path(f"{path}.{rank}").read_text().splitlines())) for rank in range(4)]


def parameters(layers: int, hidden: int) -> int:
    return layers * (12 * hidden**2 + 13 * hidden)


def test_messages_do_not_grow_with_micro_batches(launch, tmp_path):
    """In a step W weights of a stage are gathered twice, but for those of the two chunks that end the forward and begin
    the backward, and their gradients are reduced once: (DP - 1)/DP of each goes between replicas."""
    flags = ("--num-layers", 8, "--partition-state", "--train-iters", 1)
    few, many = (measured(launch, tmp_path / str(count), *flags, "--global-batch-size", 2 * count) for count in (2, 6))
    # With words and positions in the first chunk, words and the last norm in the last.
    stages = {"first": parameters(4, 64) + 64 * (128 + 64), "last": parameters(4, 64) + 64 * (128 + 2)}
    once = {"first": parameters(2, 64), "last": parameters(2, 64) + 64 * (128 + 2)}
    for (before,), (after,), stage in zip(few, many, ("first", "first", "last", "last"), strict=True):
        assert before["reduced"] == after["reduced"] == pytest.approx(stages[stage] / 2, rel=0.005)
        assert before["gathered"] == after["gathered"] == pytest.approx(stages[stage] - once[stage] / 2, rel=0.005)


def test_resident_memory_is_that_of_two_chunks_and_a_share(launch, tmp_path):
    """Of eight chunks and two replicas: at most 2/8 + 1/2 of all weights and gradients, in fp32. While a checkpoint is
    written no weights are there."""
    flags = ("--num-layers", 16, "--hidden-size", 256, "--train-iters", 2, "--save", tmp_path, "--save-interval", 2)
    flags += ("--global-batch-size", 4)
    whole, partitioned = (
        measured(launch, tmp_path / str(len(more)), *flags, *more) for more in ((), ("--partition-state",))
    )
    saved = (1 - 2 / 8 - 1 / 2) * (4 + 4) * parameters(8, 256)
    for (_, before, all_weights), (_, after, weights) in zip(whole, partitioned, strict=True):
        assert before["resident"] - after["resident"] > saved
        assert all_weights["weights"] >= 4 * parameters(8, 256) and weights["weights"] == 0
