"""Multi-token prediction on one segment; its last tokens read and predict tokens of the next segment.

Megatron shifts tokens, positions, labels and loss mask by one for each further token that it predicts, and fills the
end with zeros. Here the tokens that follow fill the end of a segment, or of each run of it that a context-parallel rank
has, and the loss is divided by the tokens of the whole micro-batch.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...process.patches import Patch, PatchTable, wrapping
from ..segment import Segment, SegmentContext


class LookAhead(NamedTuple):
    """The batch entries after each of a rank's r runs of tokens in a segment of b sequences: `entries[name]` [r, b,
    depth], zeros beyond the sequence. `counts[d]` is the sum of the loss mask of the whole micro-batch, shifted by d
    tokens. If predictions stay within documents, `ends_document` [b, n] marks tokens that another document follows."""

    entries: dict[str, Tensor]
    counts: Tensor
    ends_document: Tensor | None = None


class PredictionHeads:
    """Replaces the shifts of Megatron's multi-token prediction during one step. `ahead(segment)` returns what follows a
    segment, whose tokens are divided among `num_shares` context-parallel ranks."""

    def __init__(self, context: SegmentContext, ahead: Callable[[Segment], LookAhead], num_shares: int = 1) -> None:
        self._context = context
        self._look_ahead = ahead
        self._num_shares = num_shares
        self._segment: Segment | None = None
        self._ahead: LookAhead | None = None
        # Megatron's next shifts: an entry of the batch, and its total shift in tokens.
        self._shifts: Iterator[tuple[str, int]] = iter(())

    def patches(self) -> PatchTable:
        """The patches to bind while the step runs."""
        module = "megatron.core.transformer.multi_token_prediction"
        models = "megatron.core.models"
        shifts = "fills the end of a segment with zeros"
        loss = "divides by the tokens of a segment"
        logging = f"{module}.MTPLossLoggingHelper.save_metrics_to_tracker"
        return (
            Patch(f"{module}.roll_tensor", self._shifted, shifts),
            wrapping(f"{module}.MultiTokenPredictionLayer._get_embeddings", self._embeddings, shifts),
            wrapping(f"{models}.gpt.gpt_model.process_mtp_loss", self._loss, loss),
            wrapping(f"{models}.hybrid.hybrid_model.process_mtp_loss", self._loss, loss),
            wrapping(logging, self._log, "averages what adds up to the loss"),
        )

    def _shifted(self, tensor: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor | None, Tensor | None]:
        """Replaces `roll_tensor`: [b, n] without its first token and with the next one, and the sum of the mask."""
        name, shift = next(self._shifts, (None, 0))
        if name is None:
            raise ValueError(
                "multi-token prediction got a padding_mask, which is not cut into segments; drop --sequence-splits"
            )
        if tensor is None:
            return None, None
        ahead = self._now()
        following = ahead.entries[name][..., shift - 1 : shift].to(tensor.dtype)
        parts = []
        for run, next_token in zip(tensor.chunk(len(following), dim=1), following, strict=True):
            parts += [run[:, 1:], next_token]
        shifted = torch.cat(parts, dim=1)
        if ahead.ends_document is not None:
            shifted = shifted.masked_fill_(ahead.ends_document, 0)
        return shifted, ahead.counts[shift].to(tensor.dtype)

    def _embeddings(self, upstream: Callable[..., Any], layer: Any, *args: Any, **options: Any) -> Any:
        self._shifts = iter([("input_ids", layer.layer_number), ("position_ids", layer.layer_number)])
        return upstream(layer, *args, **options)

    def _loss(self, upstream: Callable[..., Tensor], *, labels: Tensor, config: Any, **options: Any) -> Tensor:
        if labels is None:
            raise ValueError("multi-token prediction on segments needs labels; drop --sequence-splits")
        depth = config.mtp_num_layers
        self._shifts = ((name, shift) for shift in range(1, depth + 1) for name in ("labels", "loss_mask"))
        # Megatron sums gradients per token over all ranks and divides by the unmasked tokens, or it averages them.
        factor = self._now().counts[0] if config.calculate_per_token_loss else self._num_shares
        config = copy(config)
        config.calculate_per_token_loss = False
        config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * factor
        return upstream(labels=labels, config=config, **options)

    def _log(self, upstream: Callable[..., None], loss: Tensor, *args: Any, **options: Any) -> None:
        upstream(loss * self._num_shares, *args, **options)

    def _now(self) -> LookAhead:
        """The LookAhead of the running segment."""
        segment = self._context.running_segment
        if self._ahead is None or self._segment is not segment:
            self._segment = segment
            self._ahead = self._look_ahead(segment)
        return self._ahead
