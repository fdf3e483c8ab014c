"""A step of our executor in one process: linear layers without code of Megatron's, in a pipeline of one rank."""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation, Tracer
from megatron.seq1f1b.schedule import ScheduleChoice
from support import linear_stages
from support.linear_stages import BATCH, HIDDEN, SEQUENCE, call, configuration, sum_of_squares


class Stage(linear_stages.Stage):
    """Takes and gives [b, n, h]."""

    def __init__(self) -> None:
        super().__init__(configuration(1), seed=0)


class Batches:
    """Dicts of tokens [b, s, h], for ever."""

    def __iter__(self) -> Iterator[dict]:
        return self

    def __next__(self) -> dict:
        return {"tokens": torch.ones(BATCH, SEQUENCE, HIDDEN)}


def forward_step(data_iterator, model):
    return model(next(data_iterator)["tokens"]), sum_of_squares


def executor(schedule="1f1b", k: int = 2, tracer: Tracer | None = None, timeout: float = 60.0) -> PipelineExecutor:
    """Runs a family, or a ScheduleChoice, on equal segments."""
    choice, whole = ScheduleChoice(schedule) if isinstance(schedule, str) else schedule, timedelta(seconds=timeout)
    made = PipelineExecutor(choice, Segmentation(k, lambda length: [length // k] * k), timeout=whole)
    made.tracer = tracer
    return made


def run(executor: PipelineExecutor, model: Stage, num_microbatches: int = 3, step=forward_step, **given) -> list:
    """One step; `given` are further arguments of Megatron's call, or others."""
    alone = dist.group.WORLD
    groups = ProcessGroupCollection(pp=alone, tp=alone, cp=alone, dp_cp=alone, embd=None, pos_embd=None)
    return call(
        executor, model, num_microbatches, step, **{"data_iterator": Batches(), "pg_collection": groups, **given}
    )
