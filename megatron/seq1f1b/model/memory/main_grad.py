"""Gradients of weights that add up in place: in `main_grad`, the gradients of Megatron's DistributedDataParallel, or
in sums of their own.

Tested in model/test_weight_gradient.py.
"""

import torch
from torch import Tensor


def exact_main_grad(weight: Tensor) -> Tensor | None:
    """The `main_grad` of a weight, if it has one in which products can add up: in fp32 at least."""
    main_grad = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype is _type_of_sums(weight) else None


def new_sum(weight: Tensor) -> Tensor:
    """Zeros, to which products for the gradient of a weight are added."""
    return torch.zeros_like(weight, dtype=_type_of_sums(weight))


def _type_of_sums(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def accumulated(weight: Tensor) -> Tensor | None:
    """The gradient for the hooks of a weight whose gradient was added to its `main_grad`: a mark keeps
    DistributedDataParallel from adding it again. If another layer gives the same weight an ordinary gradient
    (`zero_out_wgrad`: tied embeddings), this one is added, too, so it has to be zero."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
