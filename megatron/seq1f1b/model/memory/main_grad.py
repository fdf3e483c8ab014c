"""Gradients of weights that are added to `main_grad`, the gradients of Megatron's DistributedDataParallel, in place.

Tested in model/test_weight_gradient.py.
"""

import torch
from torch import Tensor


def accumulated(weight: Tensor) -> Tensor | None:
    """The gradient for the hooks of a weight whose gradient was added to its `main_grad`: a mark keeps
    DistributedDataParallel from adding it again. If another layer gives the same weight an ordinary gradient
    (`zero_out_wgrad`: tied embeddings), this one is added, too, so it has to be zero."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
