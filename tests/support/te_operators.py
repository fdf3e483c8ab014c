"""The operators of Transformer Engine's C++ extension that training in 32 and 16 bits calls, in torch.

Signatures are those of the extension (`transformer_engine/pytorch/csrc`), so arguments that concern fp8 only, or
the occupancy of a GPU, are taken and not used.
"""

from typing import Any

import torch
from torch import Tensor

# Members of the extension's `DType`, by name.
DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
}


def generic_gemm(
    a: Tensor,
    transposes_a: bool,
    b: Tensor,
    transposes_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    is_gradient: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    *unused: Any,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) · op(a), row by row: in cuBLAS's column order that is op(a) · op(b).

    With `bias`, a forward adds it, and a gradient returns the bias' own, the sum of the rows of `b`.
    """
    assert quantizer is None and not gelu, "only products without quantization and activation are computed on a CPU"
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    product = (rows_b.t() if transposes_b else rows_b) @ (rows_a.t() if transposes_a else rows_a)
    bias_gradient = rows_b.sum(0) if bias is not None and is_gradient else None
    if bias is not None and not is_gradient:
        product = product + bias
    if not transposes_b:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if out is None:
        return product.to(_dtype(out_dtype) or a.dtype), bias_gradient, None, None
    product = product.view_as(out)
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)
    return out, bias_gradient, None, None


def get_num_cublas_streams() -> int:
    """How many workspaces a grouped product is given."""
    return 1


def te_general_grouped_gemm(
    a: list[Tensor],
    transposes_a: bool,
    b: list[Tensor],
    transposes_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    sizes: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    has_single_output: bool,
    gelu_input: list[Tensor],
    is_gradient: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    *unused: Any,
) -> list[Tensor]:
    """`generic_gemm` for each expert, into its own output or into its rows, `sizes` each, of a single one.

    An expert without tokens gives zeros. Returns the biases, or where they are not empty, the gradients of them.
    """
    outputs = list(out[0].split(sizes)) if has_single_output else out
    for expert, (left, right, output) in enumerate(zip(a, b, outputs, strict=True)):
        own = bias[expert] if bias[expert].numel() else None
        given = left, transposes_a, right, transposes_b, output, None, out_dtype, own, bias_dtype, False, None
        _, gradient, *_ = generic_gemm(*given, is_gradient, None, 0, accumulate)
        if gradient is not None:
            bias[expert].copy_(gradient)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, out_dtype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """[n, h] to the normed rows [n, h], no mean, and the reciprocal root mean squares [n]."""
    x = _precise(x.reshape(-1, x.shape[-1]))
    scale = torch.rsqrt(x.pow(2).mean(-1) + eps)
    return (x * scale[:, None] * _factor(weight, zero_centered)).to(_dtype(out_dtype) or weight.dtype), None, scale


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x [n, h] and of the weight [h]."""
    grad_x, grad_weight, _ = _norm_bwd(grad, x, None, scale, weight, zero_centered)
    return grad_x, grad_weight


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, out_dtype: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """[n, h] to the normed rows [n, h], the means [n], and the reciprocal standard deviations [n]."""
    x = _precise(x.reshape(-1, x.shape[-1]))
    mean = x.mean(-1)
    normed, _, scale = rmsnorm_fwd(x - mean[:, None], weight, eps, out, quantizer, out_dtype, *rest)
    return normed + bias.to(normed.dtype), mean, scale


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [n, h], of the weight [h] and of the bias [h]."""
    return _norm_bwd(grad, x, mean, scale, weight, zero_centered)


def _norm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _precise(x.reshape(-1, x.shape[-1]))
    normed = (rows if mean is None else rows - mean[:, None]) * scale[:, None]
    grad = _precise(grad.reshape(normed.shape))
    by_normed = grad * _factor(weight, zero_centered)
    grad_x = by_normed - normed * (by_normed * normed).mean(-1, keepdim=True)
    if mean is not None:
        grad_x = grad_x - by_normed.mean(-1, keepdim=True)
    return (scale[:, None] * grad_x).to(x.dtype), (grad * normed).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)


def _precise(x: Tensor) -> Tensor:
    """In fp32 at least, as the kernels compute."""
    return x if x.dtype is torch.float64 else x.float()


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return _precise(weight) + (1 if zero_centered else 0)


def _dtype(dtype: Any) -> torch.dtype | None:
    """The torch type of a `DType`; a torch type is one already."""
    return DTYPES[dtype.name] if hasattr(dtype, "name") else dtype
