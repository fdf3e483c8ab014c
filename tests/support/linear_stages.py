"""Stages of linear layers, without code of Megatron's, and their steps: for tests of schedule functions."""

from collections.abc import Callable, Iterator

import torch
from megatron.core import ModelParallelConfig

SEQUENCE, BATCH, HIDDEN = 8, 2, 4


class Stage(torch.nn.Module):
    """`width` linear layers on [s, b, h], and a tanh; notes the calls that a schedule function makes."""

    def __init__(self, config: ModelParallelConfig, seed: int, vp_stage: int | None = None, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config, self.model_type, self.vp_stage = config, None, vp_stage
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(width)))
        self.input, self.calls = None, []

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


def forward_step(data_iterator, model):
    return model(next(data_iterator)), mean_square


def mean_square(output: torch.Tensor):
    loss = output.square().mean()
    return loss, {"loss": loss.detach()}


def sum_of_squares(output: torch.Tensor):
    loss, count = output.square().sum(), torch.tensor(output.numel())
    return loss, count, {"loss": loss.detach()}


def call(function: Callable, model: Stage | list[Stage], m: int, step=forward_step, **given) -> list:
    """A step of m micro-batches; `given` are further arguments of a schedule function, or others."""
    arguments = {
        "forward_step_func": step,
        "data_iterator": [batches(m) for _ in (model if isinstance(model, list) else [model])],
        "model": model,
        "num_microbatches": m,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    return function(**{**arguments, **given})
