"""The auxiliary losses of a mixture of experts, by segments.

The z-loss is a mean over tokens, so each segment adds its share. A balance loss multiplies two sums over tokens, the
tokens of each expert and its probabilities (Switch Transformer, arXiv 2101.03961, equations 4 to 6):

    loss = factor · Σ_experts (Σ_tokens chosen) · (Σ_tokens probability)

The first sum has no gradient, so every probability is multiplied by the count over the whole micro-batch, which is
complete when the first backward starts, since all segments have gone forward.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...process.patches import wrapping
from ..carried import Carried

# Megatron's names. The second sums over the tokens of each sequence, the third over those of a step.
_BY_SEQUENCE = "seq_aux_loss"
_OVER_STEP = "global_aux_loss"
_BALANCES = "aux_loss", _BY_SEQUENCE, _OVER_STEP


class _Tally(Carried):
    """The sums of a balance loss over one micro-batch, whose segments come in any order. `counts` are the tokens of
    each expert by segment, `before` the summed counts of earlier ones of the `microbatches` to average over."""

    def __init__(self, before: Tensor | float = 0.0, microbatches: Tensor | float = 1.0) -> None:
        self.counts: dict[int, Tensor] = {}
        self._before = before
        self._microbatches = microbatches
        self._probabilities: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0

    def tensors(self) -> Iterable[Tensor]:
        sums = (self._before, self._microbatches, self._probabilities, self._loss)
        tensors = [total for total in sums if isinstance(total, Tensor)]  # numbers before the first segment
        return [*self.counts.values(), *tensors]

    def chosen(self) -> Tensor:
        """Tokens of each expert, averaged over micro-batches; complete once all segments have gone forward."""
        counts: Any = sum(self.counts.values())  # of one segment at least
        return (self._before + counts) / self._microbatches

    def add(self, probabilities: Tensor) -> Tensor:
        """The growth of Σ_experts chosen · probability with a segment, in at least fp32: new probabilities by all
        counts so far, and new counts by earlier probabilities."""
        probabilities = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        self._probabilities = self._probabilities + probabilities
        before = self._loss
        self._loss = (self._probabilities * self.chosen()).sum()
        return self._loss - before


class _Product(torch.autograd.Function):
    """A segment's part of a balance loss; its backward multiplies by the counts of all segments."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, tally: _Tally, factor: float, end: Callable) -> Tensor:
        ctx.tally = tally
        ctx.factor = factor
        ctx.dtype = probabilities.dtype
        ctx.end = end
        return tally.add(probabilities) * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        ctx.end()
        chosen = ctx.tally.chosen()
        # The gradient, a tensor without dimensions, does not raise the type of the counts.
        chosen = chosen.to(torch.promote_types(ctx.dtype, chosen.dtype))
        return (grad_output * ctx.factor * chosen).to(ctx.dtype), None, None, None


def _apply_balance(
    balance: str,
    router: TopKRouter,
    of_whole_sequences: Callable[..., Tensor],
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    *shape: int,
    **kwargs: Any,
) -> Tensor:
    """Attach a balance loss to `probs` and log it. `probs`, `scores` and `routing_map` are [tokens, experts]; `shape`
    is the number of tokens and of sequences, for a loss by sequence. Raises ValueError for a padding mask."""
    context = router.segment_context
    layer = (router, balance)
    segment = context.segment
    coefficient = router.get_aux_loss_coeff(balance)
    if segment is None or segment.is_whole_sequence or coefficient <= 0:
        return of_whole_sequences(probs, scores, routing_map, *shape, **kwargs)
    if kwargs.get("with_padding_mask"):
        raise ValueError(
            "a balance loss of experts got a padding_mask, which is not cut into segments; drop --sequence-splits"
        )
    group = _group(router, balance)
    sequences = shape[1] if balance == _BY_SEQUENCE else 1
    tally = _count_segment(router, balance, routing_map, sequences)
    # Of the whole micro-batch, or of each of its sequences, on this rank.
    tokens = scores.shape[0] // sequences * segment.sequence_length / segment.length
    # coefficient · E / (topk · T²) for E experts and T tokens of all ranks: `switch_load_balancing_loss_func`.
    factor = router.num_experts * coefficient / (router.topk * (tokens * group.size()) ** 2)
    probabilities = scores.reshape(-1, sequences * router.num_experts).sum(dim=0)
    loss = _Product.apply(probabilities, tally, factor, context.at_end_of_backward(layer)) / sequences
    context.end_forward(layer, loss)
    return router.attach_and_log_load_balancing_loss(
        probs,
        coefficient,
        loss,
        balance.replace("aux_loss", "load_balancing_loss"),
        group,
        needs_dp_avg=balance != _OVER_STEP,
        valid_token_count=tokens * sequences,
    )


def _routing(
    router: TopKRouter,
    routing: Callable[..., Any],
    logits: Tensor,
    padding_mask: Tensor | None = None,
    **others: Any,
) -> Any:
    """Count in the first forward of recomputed layers: Megatron adds losses in the repeated one, too late."""
    context = router.segment_context
    segment = context.segment
    will_be_repeated = router.training and context.keeps_for_backward and not torch.is_grad_enabled()
    balances = [balance for balance in _BALANCES if router.get_aux_loss_coeff(balance) > 0]
    if segment is not None and not segment.is_whole_sequence and will_be_repeated and balances:
        chosen, _ = compute_routing_scores_for_aux_loss(
            logits.view(-1, router.num_experts),
            router.topk,
            router.score_function,
            fused=router.config.moe_router_fusion,
        )
        for balance in balances:
            sequences = logits.shape[1] if balance == _BY_SEQUENCE else 1
            _count_segment(router, balance, chosen, sequences)
    return routing(logits, padding_mask=padding_mask, **others)


def _count_segment(router: TopKRouter, balance: str, routing_map: Tensor, sequences: int) -> _Tally:
    """Count the tokens of each expert in the running segment, again if its forward is repeated, and return the
    tally of its micro-batch. The last segment completes the counts of a loss over the step, which the router has."""

    def make() -> _Tally:
        if balance != _OVER_STEP:
            return _Tally()
        dtype = torch.promote_types(router.ga_steps.dtype, torch.float32)  # 16-bit models have both in 16 bits
        return _Tally(
            before=router.global_tokens_per_expert.to(dtype, copy=True),
            microbatches=router.ga_steps.to(dtype) + 1,
        )

    tally = router.segment_context.carried((router, balance), make)
    segment = router.segment_context.segment
    is_complete = segment.is_last and segment.index not in tally.counts
    tally.counts[segment.index], *_ = get_tokens_per_expert_and_token_count(
        routing_map.reshape(-1, sequences * router.num_experts), _group(router, balance)
    )
    if is_complete and balance == _OVER_STEP:
        # Both at once: in a schedule file the next micro-batch may have begun, and must not count this one without
        # its tokens.
        router.global_tokens_per_expert += sum(tally.counts.values())
        router.ga_steps += 1
    return tally


def _group(router: TopKRouter, balance: str) -> Any:
    return router.tp_dp_cp_group if balance == _OVER_STEP else router.tp_cp_group


def _apply_z_loss(
    router: TopKRouter, of_whole_sequences: Callable[..., Tensor], logits: Tensor, padding_mask: Tensor | None = None
) -> Tensor:
    """Attach the segment's share of the z-loss to `logits` and log it."""
    segment = router.segment_context.segment
    coefficient = router.config.moe_z_loss_coeff
    if segment is None or coefficient is None or not (router.training and torch.is_grad_enabled()):
        return of_whole_sequences(logits, padding_mask=padding_mask)
    share = segment.length / segment.sequence_length
    # Averaged over the ranks that share the tokens of a sequence; the log sums over them.
    loss = z_loss_func(logits, share * coefficient / router.tp_cp_group.size(), padding_mask)
    return router.attach_and_log_load_balancing_loss(
        logits, coefficient, loss, "z_loss", router.tp_cp_group, valid_token_count=logits.shape[0] / share
    )


_ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
SEGMENT_PATCHES = (
    wrapping(f"{_ROUTER}.apply_z_loss", _apply_z_loss, "averages over a segment instead of a sequence"),
    wrapping(f"{_ROUTER}.routing", _routing, "has no losses, and so no counts, until a forward is repeated"),
    *(
        wrapping(f"{_ROUTER}._apply_{balance}", partial(_apply_balance, balance), "multiplies sums over a segment")
        for balance in _BALANCES
    ),
)
