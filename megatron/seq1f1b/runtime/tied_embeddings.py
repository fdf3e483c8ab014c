"""Gradients of tied embeddings whose embedding and output layer are model chunks of one rank, as in a V."""

from collections.abc import Sequence

import torch
from megatron.core.distributed.finalize_model_grads import _get_main_grad_attr


def add_up_tied_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Give both weights the sum of their gradients; Megatron sums over two ranks, at the end of a step, too."""
    first, last = _bare(chunks[0]), _bare(chunks[-1])
    if first is last or not getattr(first, "share_embeddings_and_output_weights", False):
        return
    if not (first.pre_process and last.post_process):
        return
    weights = [model.shared_embedding_or_output_weight() for model in (first, last)]
    embedding, output = (getattr(weight, _get_main_grad_attr(weight)) for weight in weights)
    if embedding is not None and output is not None:  # they are, where the weights are frozen
        embedding += output
        output.copy_(embedding)


def _bare(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk
