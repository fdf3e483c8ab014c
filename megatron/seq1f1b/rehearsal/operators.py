"""What GPU operators allocate during their call, which their results do not show."""

from collections.abc import Sequence
from typing import Any

import torch

_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
_ROWS = 128  # flash attention rounds the number of queries up to this


def workspace_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes of PyTorch's allocator that `operator` holds while it runs, beyond what it returns; 0 where none is known.

    The backward of flash attention 2 sums the gradient of the queries in fp32 before it rounds, at a head size that is
    a multiple of 32 (64 above 128), keeps one fp32 number a query and head (`dq_accum` and `softmax_d` in mha_bwd of
    pytorch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), and for grouped KV heads makes gradients
    of keys and values for every query head.
    """
    if operator is not _FLASH_BACKWARD:
        return 0
    query, key = args[1], args[2]
    *_, length, heads, size = query.shape if query.dim() == 4 else (1, *query.shape)
    sequences = query.shape[0] if query.dim() == 4 else 1
    rows = -(-length // _ROWS) * _ROWS
    step = 32 if size <= 128 else 64
    padded = min(-(-size // step) * step, 256)
    in_fp32 = 4 * sequences * heads * rows * (padded + 1)
    kv_heads = key.shape[-2]
    expanded = 2 * key.numel() // kv_heads * heads * key.element_size() if kv_heads != heads else 0
    return in_fp32 + expanded
