"""What the equality of mixtures of experts needs beside losses and gradients.

Balance losses depend on the set of tokens that they are taken over. Megatron's own unsegmented run takes them over
micro-batches; `balance_by_segment` makes it take them over segments, each by its share of the tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


def routers(chunks) -> list[TopKRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


@contextmanager
def balance_by_segment(chunks, lengths: Sequence[int]) -> Iterator[None]:
    """Routers of whole sequences, whose balance losses are means over the segments, weighed by their tokens."""
    found = routers(chunks)
    for router in found:
        router._apply_aux_loss = _by_segment(router, lengths, "aux_loss")
        router._apply_seq_aux_loss = _by_segment(router, lengths, "seq_aux_loss")
        router._apply_global_aux_loss = _by_segment(router, lengths, "global_aux_loss")
    try:
        yield
    finally:
        for router in found:
            del router._apply_aux_loss, router._apply_seq_aux_loss, router._apply_global_aux_loss


def _by_segment(router: TopKRouter, lengths: Sequence[int], kind: str):
    seen = []  # tokens of each expert, by segment of this step

    def apply(probs, scores, routing_map, *_, with_padding_mask=False):
        coefficient = router.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        batch = scores.shape[0] // sum(lengths)
        loss, start = 0.0, 0
        for length in lengths:
            rows = slice(start * batch, (start + length) * batch)
            part, chosen, tokens = scores[rows], routing_map[rows], length * batch
            if kind == "seq_aux_loss":
                part, chosen, tokens = part.reshape(length, -1), chosen.reshape(length, -1), length
            counts = chosen.sum(dim=0)
            if kind == "global_aux_loss":
                seen.append(counts)
                counts = sum(seen).double() * counts.sum() / sum(seen).sum()
            segment = switch_load_balancing_loss_func(
                part, counts, tokens, router.topk, router.num_experts, coefficient
            )
            if kind == "seq_aux_loss":
                segment = segment / batch
            loss = loss + segment * (length / sum(lengths))
            start += length
        group, averaged = (router.tp_dp_cp_group, False) if kind == "global_aux_loss" else (router.tp_cp_group, True)
        return router.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, NAMES[kind], group, needs_dp_avg=averaged, valid_token_count=scores.shape[0]
        )

    return apply


def set_biases(chunks) -> dict[str, torch.Tensor]:
    """The biases by which routers without balance losses learn balance, far from zero, which would be no bias."""
    found = {f"expert bias of layer {router.layer_number}": router.expert_bias for router in routers(chunks)}
    return {
        name: bias.copy_(torch.linspace(-0.2, 0.2, len(bias))) for name, bias in found.items() if bias is not None
    }


def logged(num_microbatches: int, num_layers: int, kinds: Sequence[str]) -> dict[str, float]:
    """The auxiliary losses of the step as Megatron's training loop logs them; forgets them."""
    losses = {}
    get_moe_metrics_tracker().report(
        1 / num_microbatches,
        0,
        num_layers=num_layers,
        force_initialize=True,
        track_names=[NAMES[kind] for kind in kinds],
        total_loss_dict=losses,
    )
    return {name: float(loss) for name, loss in losses.items()}
