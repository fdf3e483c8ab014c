"""The auxiliary losses of a mixture of experts, on one segment.

A router sends every token to its experts by that token alone, so segments change nothing there. The losses that it adds
to the model's own, for balance and for small logits, are means over the tokens of one forward, here of one segment.
Each counts by the segment's share of its micro-batch, n of S tokens, in the gradient and in the log: the sum over the
segments is then again a mean over the tokens of the micro-batch, however it is cut. For the z-loss, a mean of something
that each token has, it is the very same; balance is then asked of every segment instead of the micro-batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from .segment import SegmentContext


def weigh_losses(router: TopKRouter, context: SegmentContext) -> None:
    """Make the auxiliary losses of `router` count by the share that the running segment of `context` has."""
    if not hasattr(router, "segment_context"):
        router.attach_and_log_load_balancing_loss = partial(_attach, router, router.attach_and_log_load_balancing_loss)
        router.apply_z_loss = partial(_apply_z_loss, router)
        if router.ga_steps is not None:
            router.microbatches_seen = 0.0
            router._apply_global_aux_loss = partial(_apply_global_loss, router, router._apply_global_aux_loss)
            router.reset_global_aux_loss_tracker = partial(
                _reset_global_loss, router, router.reset_global_aux_loss_tracker
            )
    router.segment_context = context


def _share(router: TopKRouter) -> float:
    segment = router.segment_context.segment
    return 1.0 if segment is None else segment.length / segment.sequence_length


def _attach(
    router: TopKRouter,
    attach: Callable[..., Tensor],
    activation: Tensor,
    coefficient: float,
    loss: Tensor,
    *args: Any,
    valid_token_count: int | Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attach the segment's share of `loss`, and log it.

    With --calculate-per-token-loss Megatron multiplies by the number of tokens, which is then that of the micro-batch.
    """
    share = _share(router)
    tokens = activation.shape[0] if valid_token_count is None else valid_token_count
    return attach(activation, coefficient, loss * share, *args, valid_token_count=tokens / share, **kwargs)


def _apply_z_loss(router: TopKRouter, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Megatron's z-loss, attached as its other losses are; its own method logs a value that cannot be weighed."""
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not (router.training and torch.is_grad_enabled()):
        return logits
    # The mean over the ranks that share the tokens of a sequence; the log sums over them.
    loss = z_loss_func(logits, coefficient / router.tp_cp_group.size(), padding_mask)
    tokens = None if padding_mask is None else (~padding_mask).sum()
    return router.attach_and_log_load_balancing_loss(
        logits, coefficient, loss, "z_loss", router.tp_cp_group, valid_token_count=tokens
    )


def _apply_global_loss(router: TopKRouter, apply: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Megatron takes the mean of the tokens that experts got over the `ga_steps` forwards of this step.

    The forwards of before count here as so many of the length of the running segment.
    """
    share = _share(router)
    router.ga_steps.fill_(router.microbatches_seen / share)
    router.microbatches_seen += share
    return apply(*args, **kwargs)


def _reset_global_loss(router: TopKRouter, reset: Callable[[], None]) -> None:
    router.microbatches_seen = 0.0
    reset()
