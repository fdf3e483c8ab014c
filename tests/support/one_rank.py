"""A step of our executor in one process: a linear layer without code of Megatron's, in a pipeline of one rank."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.seq1f1b.runtime import PipelineExecutor

SEQUENCE, BATCH, HIDDEN = 8, 2, 4


class Stage(torch.nn.Module):
    """Takes and gives [b, n, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.model_type = ModelParallelConfig(pipeline_dtype=torch.float32), None
        self.config.hidden_size = HIDDEN
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def set_input_tensor(self, tensors: list) -> None:
        assert tensors == [None]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(tokens).tanh()


class Batches:
    """Dicts of tokens [b, s, h], for ever."""

    def __iter__(self) -> Iterator[dict]:
        return self

    def __next__(self) -> dict:
        return {"tokens": torch.ones(BATCH, SEQUENCE, HIDDEN)}


def forward_step(data_iterator, model):
    output = model(next(data_iterator)["tokens"])

    def loss_func(output):
        loss = output.square().sum()
        return loss, torch.tensor(output.numel(), dtype=torch.int), {"loss": loss.detach()}

    return output, loss_func


def run(executor: PipelineExecutor, model: Stage, num_microbatches: int = 3, step=forward_step, **given) -> list:
    """One step; `given` are further arguments of Megatron's call, or others."""
    alone = dist.group.WORLD
    groups = ProcessGroupCollection(pp=alone, tp=alone, cp=alone, dp_cp=alone, embd=None, pos_embd=None)
    arguments = {
        "forward_step_func": step,
        "data_iterator": Batches(),
        "model": model,
        "num_microbatches": num_microbatches,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "pg_collection": groups,
    }
    return executor(**{**arguments, **given})
