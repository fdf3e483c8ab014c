"""Reduces the gradients of model chunks over data-parallel ranks, and ends a training step.

Megatron's DistributedDataParallel reduces a bucket when its last parameter is ready, but only outside of `no_sync`,
which we leave for the last backward of each chunk. Of split backwards, that is the last of each half: every parameter
must become ready as often in each step as in the first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import _get_main_grad_attr
from megatron.core.utils import unwrap_model

from ...process.ranks import results_on_all_ranks
from ..forwards.loss import Losses
from ..step import Step
from .chunk_sync import ChunkSync
from .partitioned_state import is_partitioned

Hook = Callable[..., Any] | None


class GradientSync(ChunkSync):
    """Follows Megatron's `no_sync_func`, `grad_sync_func` and `param_sync_func` for one model chunk in one step."""

    def __init__(self, chunk: torch.nn.Module, no_sync: Hook = None, reduce: Hook = None, gather: Hook = None) -> None:
        super().__init__()
        self._chunk = chunk
        self._make_no_sync = no_sync or nullcontext
        self._start_reduction = reduce
        self._start_gather = gather
        self._no_sync.enter_context(self._make_no_sync())

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside, the DDP hooks may reduce, unless Megatron sets `grad_sync_func`."""
        if not self._start_reduction:
            self._no_sync.close()
        yield
        if not self._start_reduction:
            self._no_sync.enter_context(self._make_no_sync())

    def reduce(self) -> None:
        """Reduce the whole chunk now if Megatron aligns reductions (`align_grad_reduce`)."""
        self._no_sync.close()
        if self._start_reduction:
            self._start_reduction(self._chunk.parameters())

    def gather(self) -> None:
        """Gather the parameters of the chunk now if Megatron aligns that (`--align-param-gather`)."""
        if self._start_gather:
            self._start_gather(self._chunk.parameters())


def gradient_syncs(config: Any, chunks: Sequence[Any], finishes_last: bool = False) -> Sequence[ChunkSync]:
    """One ChunkSync for each chunk of a rank. Megatron passes a bare hook for one chunk, a list for several. On the
    rank that `finishes_last` with its only chunk, DDP's hooks may reduce even with `grad_sync_func`."""
    if is_partitioned(chunks):
        return [chunk.partitioned_state.begin(chunk, chunks) for chunk in chunks]
    no_sync_hooks = _by_chunk(config.no_sync_func, chunks)
    reduce_hooks = _by_chunk(None if finishes_last else config.grad_sync_func, chunks)
    gather_hooks = _by_chunk(config.param_sync_func, chunks)
    return [
        GradientSync(chunk, no_sync=no_sync, reduce=reduce, gather=gather)
        for chunk, no_sync, reduce, gather in zip(chunks, no_sync_hooks, reduce_hooks, gather_hooks, strict=True)
    ]


def _by_chunk(hook: Hook | list[Hook], chunks: Sequence[Any]) -> list[Hook]:
    return hook if isinstance(hook, list) else [hook] * len(chunks)


def finalize_gradients(step: Step, losses: Losses) -> None:
    """Megatron's end of a training step: sums of gradients over ranks, divided by the number of tokens."""
    config = step.config
    if config.finalize_model_grads_func is None:
        return
    num_tokens = losses.total_num_tokens(step.device) if config.calculate_per_token_loss else None
    if num_tokens is not None and step.placement.turns:
        # The loss may be on the first rank, but Megatron takes the number of the last one.
        dist.all_reduce(num_tokens, group=step.pipeline)
    config.finalize_model_grads_func(
        step.chunks, num_tokens, pg_collection=step.groups, force_all_reduce=step.force_all_reduce
    )
    add_up_tied_embeddings(step.chunks)


def tied_embeddings(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """The weights of the embedding and their copy in the last chunk, for a tied output layer or for multi-token
    prediction, if this rank has both chunks, as in a V."""
    first = unwrap_model(chunks[0])
    last = unwrap_model(chunks[-1])
    if first is last or not (getattr(first, "pre_process", False) and getattr(last, "post_process", False)):
        return []
    if not (first.share_embeddings_and_output_weights or getattr(last, "mtp_process", False)):
        return []
    return [model.shared_embedding_or_output_weight() for model in (first, last)]


def check_tied_embeddings(step: Step) -> None:
    """Raise ValueError on all ranks of the pipeline if one copy of the embedding is frozen and another is not. Megatron
    sums their gradients over ranks, where the one with a gradient would wait for ever, and in a V they would differ
    after a step."""
    if step.config.finalize_model_grads_func is None:
        return

    def have_gradients() -> list[bool]:
        return [_has_gradient(weight) for weight in _copies_of_embedding(step)]

    of_ranks = results_on_all_ranks(have_gradients, "the embeddings that are trained", step.pipeline)
    frozen = [rank for rank, copies in enumerate(of_ranks) if not all(copies)]
    trained = [rank for rank, copies in enumerate(of_ranks) if any(copies)]
    if frozen and trained:
        raise ValueError(
            f"the embedding is frozen on pipeline rank {frozen[0]}, but its tied copy on pipeline rank {trained[-1]} "
            "is not; set requires_grad of both alike, or build the model with share_embeddings_and_output_weights=False"
        )


def _copies_of_embedding(step: Step) -> list[torch.nn.Parameter]:
    """The weights of the embedding, of the output layer tied to it, and of its copy for multi-token prediction, that
    this rank has."""
    predicts = bool(getattr(step.config, "mtp_num_layers", 0))
    copies = []
    for model in map(unwrap_model, step.chunks):
        is_first = getattr(model, "pre_process", False)
        is_last = getattr(model, "post_process", False)
        is_tied = getattr(model, "share_embeddings_and_output_weights", False) and (is_first or is_last)
        if is_tied or (predicts and is_first) or getattr(model, "mtp_process", False):
            copies.append(model.shared_embedding_or_output_weight())
    return copies


def _has_gradient(weight: torch.nn.Parameter) -> bool:
    return weight.requires_grad or getattr(weight, "main_grad", None) is not None


def add_up_tied_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Give both weights the sum of their gradients, as Megatron does at the end of a step if two ranks have them."""
    gradients = [getattr(weight, _get_main_grad_attr(weight)) for weight in tied_embeddings(chunks)]
    if gradients and all(gradient is not None for gradient in gradients):  # None if the weights are frozen
        embedding, output = gradients
        embedding += output
        output.copy_(embedding)
