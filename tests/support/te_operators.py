"""The operators of Transformer Engine's C++ extension that training in 32 and 16 bits calls, in torch.

Arguments are those of the extension (`transformer_engine/pytorch/csrc`) by position: `_` takes those that concern fp8,
or the occupancy of a GPU.
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


def generic_gemm(*given: Any, **overlap: Any) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) · op(a), row by row: in cuBLAS's column order that is op(a) · op(b).

    With `bias`, a forward adds it, and a gradient returns the bias' own, the sum of the rows of `b`.
    """
    a, transposes_a, b, transposes_b, out, quantizer, out_dtype, bias, _, gelu, _, is_gradient, _, _, adds, *_ = given
    assert quantizer is None and not gelu, "only products without quantization and activation are computed on a CPU"
    rows_a = a.reshape(-1, a.shape[-1])
    rows_b = b.reshape(-1, b.shape[-1])
    product = (rows_b.t() if transposes_b else rows_b) @ (rows_a.t() if transposes_a else rows_a)
    bias_gradient = rows_b.sum(0) if bias is not None and is_gradient else None
    if bias is not None and not is_gradient:
        product = product + bias
    if out is None:
        shape = product.shape if transposes_b else (*b.shape[:-1], product.shape[-1])
        return product.reshape(shape).to(_dtype(out_dtype) or a.dtype), bias_gradient, None, None
    product = product.view_as(out)
    out.copy_(out + product if adds else product)
    return out, bias_gradient, None, None


def te_general_grouped_gemm(*given: Any) -> list[Tensor]:
    """`generic_gemm` for each expert, into its own output or into its rows, `sizes` each, of a single one.

    An expert without tokens gives zeros. Returns the biases, or where they are not empty, the gradients of them.
    """
    a, transposes_a, b, transposes_b, out, out_dtype, sizes, bias, _, is_single, _, is_gradient, _, _, adds, *_ = given
    outputs = out[0].split(sizes) if is_single else out
    for left, right, output, of_expert in zip(a, b, outputs, bias, strict=True):
        own = of_expert if of_expert.numel() else None
        _, gradient, *_ = generic_gemm(
            left,
            transposes_a,
            right,
            transposes_b,
            output,
            None,
            out_dtype,
            own,
            None,
            False,
            None,
            is_gradient,
            None,
            0,
            adds,
        )
        if gradient is not None:
            of_expert.copy_(gradient)
    return bias


def get_num_cublas_streams() -> int:
    """How many workspaces a grouped product is given."""
    return 1


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[n, h] to the normed rows [n, h], the means [n], and the reciprocal standard deviations [n]."""
    _, _, out_dtype, _, zero_centered = given
    x = _precise(x.reshape(-1, x.shape[-1]))
    mean = x.mean(-1)
    scale = torch.rsqrt(x.var(-1, correction=0) + eps)
    normed = (x - mean[:, None]) * scale[:, None] * _factor(weight, zero_centered) + _precise(bias)
    return normed.to(_dtype(out_dtype) or weight.dtype), mean, scale


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """Gradients of x [n, h], of the weight [h] and of the bias [h]."""
    _, zero_centered = given
    normed = (_precise(x.reshape(-1, x.shape[-1])) - mean[:, None]) * scale[:, None]
    grad = _precise(grad.reshape(normed.shape))
    by_normed = grad * _factor(weight, zero_centered)
    along = normed * (by_normed * normed).mean(-1, keepdim=True) + by_normed.mean(-1, keepdim=True)
    grad_x = scale[:, None] * (by_normed - along)
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *given: Any) -> tuple[Tensor, None, Tensor]:
    """[n, h] to the normed rows [n, h], no means, and the reciprocal root mean squares [n]."""
    _, _, out_dtype, _, zero_centered = given
    x = _precise(x.reshape(-1, x.shape[-1]))
    scale = torch.rsqrt(x.square().mean(-1) + eps)
    normed = x * scale[:, None] * _factor(weight, zero_centered)
    return normed.to(_dtype(out_dtype) or weight.dtype), None, scale


def rmsnorm_bwd(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x [n, h] and of the weight [h]."""
    _, zero_centered = given
    normed = _precise(x.reshape(-1, x.shape[-1])) * scale[:, None]
    grad = _precise(grad.reshape(normed.shape))
    by_normed = grad * _factor(weight, zero_centered)
    grad_x = scale[:, None] * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """What a norm multiplies by: a weight that is zero-centered is the difference from 1."""
    return _precise(weight) + 1 if zero_centered else _precise(weight)


def _precise(x: Tensor) -> Tensor:
    """In fp32 at least, as the kernels compute."""
    return x if x.dtype is torch.float64 else x.float()


def _dtype(dtype: Any) -> torch.dtype | None:
    """The torch type of a `DType`; a torch type is one already."""
    return DTYPES[dtype.name] if hasattr(dtype, "name") else dtype
