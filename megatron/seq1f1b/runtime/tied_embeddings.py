"""Gradients of embeddings that two model chunks of one rank have, as in a V."""

from collections.abc import Sequence

import torch
from megatron.core.distributed.finalize_model_grads import _get_main_grad_attr


def tied_embeddings(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """The weights of the embedding in the first and in the last chunk of a rank; none if the last has no such weights.

    They are those of an output layer that is tied to the embedding, or multi-token prediction's copy.
    """
    first, last = _bare(chunks[0]), _bare(chunks[-1])
    if first is last or not (getattr(first, "pre_process", False) and getattr(last, "post_process", False)):
        return []
    if not (first.share_embeddings_and_output_weights or getattr(last, "mtp_process", False)):
        return []
    return [model.shared_embedding_or_output_weight() for model in (first, last)]


def add_up_tied_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Give both weights the sum of their gradients; Megatron sums over two ranks, at the end of a step, too."""
    weights = tied_embeddings(chunks)
    if not weights:
        return
    embedding, output = (getattr(weight, _get_main_grad_attr(weight)) for weight in weights)
    if embedding is not None and output is not None:  # they are, where the weights are frozen
        embedding += output
        output.copy_(embedding)


def _bare(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk
