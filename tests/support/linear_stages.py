"""Stages of linear layers, without code of Megatron's, and their steps: for tests of schedule functions."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import ScheduleChoice

SEQUENCE = 8
BATCH = 2
HIDDEN = 4


class Stage(torch.nn.Module):
    """`width` linear layers on [s, b, h], and a tanh; notes the calls that a schedule function makes."""

    def __init__(self, config: ModelParallelConfig | None = None, seed=0, vp_stage: int | None = None, width=1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config or configuration(ranks=1)
        self.model_type = None
        self.vp_stage = vp_stage
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(width)))
        self.input = None
        self.calls = []

    def set_input_tensor(self, tensors: list) -> None:
        self.input = tensors[0]

    def set_is_first_microbatch(self) -> None:
        self.calls.append("first micro-batch")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls.append("forward")
        return self.layers(tokens if self.input is None else self.input).tanh()


def configuration(ranks: int, **given) -> ModelParallelConfig:
    made = ModelParallelConfig(pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float32, **given)
    made.hidden_size = HIDDEN
    return made


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)


def endless() -> Iterator[torch.Tensor]:
    """Batches [b, s, h], as in Megatron's data sets."""
    while True:
        yield torch.ones(BATCH, SEQUENCE, HIDDEN)


def forward_step(data_iterator, model):
    return model(next(data_iterator)), mean_square


def summed(data_iterator, model):
    return model(next(data_iterator)), sum_of_squares


def mean_square(output: torch.Tensor):
    loss = output.square().mean()
    return loss, {"loss": loss.detach()}


def sum_of_squares(output: torch.Tensor):
    loss = output.square().sum()
    count = torch.tensor(output.numel())
    return loss, count, {"loss": loss.detach()}


def call(function: Callable, model: Stage | list[Stage], m: int, step=forward_step, **given) -> list:
    """A step of m micro-batches; `given` are further arguments of a schedule function, or others."""
    data = [batches(m) for _ in (model if isinstance(model, list) else [model])]
    sizes = {"num_microbatches": m, "seq_length": SEQUENCE, "micro_batch_size": BATCH}
    return function(**{"forward_step_func": step, "data_iterator": data, "model": model, **sizes, **given})


def executor(schedule="1f1b", k: int = 2, timeout: float = 60.0, **options) -> PipelineExecutor:
    """Runs a family, or a ScheduleChoice, on equal segments; `options` are the executor's own."""
    choice = ScheduleChoice(schedule) if isinstance(schedule, str) else schedule
    equal = Segmentation(k, lambda length: [length // k] * k)
    return PipelineExecutor(choice, equal, timeout=timedelta(seconds=timeout), **options)


def run(executor: PipelineExecutor, model: Stage, num_microbatches: int = 3, step=summed, **given) -> list:
    """A step in a pipeline of one rank; `given` as for `call`."""
    alone = dist.group.WORLD
    groups = ProcessGroupCollection(pp=alone, tp=alone, cp=alone, dp_cp=alone, embd=None, pos_embd=None)
    return call(
        executor, model, num_microbatches, step, **{"data_iterator": endless(), "pg_collection": groups} | given
    )
