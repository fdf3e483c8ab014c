"""What the equality of mixtures of experts looks at beside losses and gradients."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


def routers(chunks) -> list[TopKRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def set_biases(chunks) -> dict[str, torch.Tensor]:
    """The biases by which routers without balance losses learn balance, far from zero, which would be no bias."""
    found = {f"expert bias of layer {router.layer_number}": router.expert_bias for router in routers(chunks)}
    return {name: bias.copy_(torch.linspace(-0.2, 0.2, len(bias))) for name, bias in found.items() if bias is not None}


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
