"""The same model under torch.distributed.pipelining."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .model import Batch


class _Stage(torch.nn.Module):
    """A Megatron pipeline stage as a plain module: tokens or activations in, activations or losses out."""

    def __init__(self, chunk: torch.nn.Module, batch: Batch) -> None:
        super().__init__()
        self.chunk = chunk
        self.batch = batch

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.chunk.module.pre_process:
            return self.chunk(x, self.batch.positions, None, labels=labels)
        self.chunk.module.set_input_tensor(x)
        return self.chunk(None, self.batch.positions, None, labels=labels)


def schedule_1f1b(model: list[torch.nn.Module], batch: Batch, num_microbatches: int) -> Callable[[], None]:
    """One training step under `Schedule1F1B`: micro-batches are chunks of a batch, the last stage computes the loss.

    Gradients take Megatron's way, as in all other steps: to the buffers of its DistributedDataParallel.
    """
    (chunk,) = model
    group = parallel_state.get_pipeline_model_parallel_group()
    stage = PipelineStage(_Stage(chunk, batch), group.rank(), group.size(), batch.tokens.device, group=group)

    def loss(losses: torch.Tensor, _) -> torch.Tensor:
        return losses.mean() / num_microbatches  # as Megatron scales it; PyTorch would scale .grad, which is empty

    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss, scale_grads=False)
    tokens, labels = (x.expand(num_microbatches, -1) for x in (batch.tokens, batch.labels))
    inputs = (tokens,) if stage.is_first else ()
    last = {"labels": labels, "target": labels} if stage.is_last else {}

    def step() -> None:
        schedule.step(*inputs, **last, return_outputs=False)
        finalize_model_grads(model)

    return step
