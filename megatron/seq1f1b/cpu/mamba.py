"""Mamba's gated norm, which Megatron derives from mamba-ssm's."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class GatedRMSNorm(torch.nn.Module):
    """x · silu(z), normalised in groups of `group_size`, times the weight; under the name and arguments of Megatron's
    `ExtendedRMSNorm`. Computes at least in fp32."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "Megatron's layers gate before they normalise"
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        x, weight = (y.to(torch.promote_types(dtype, torch.float32)) for y in (x, self.weight))
        if z is not None:
            x = x * F.silu(z.to(x.dtype))
        groups = x.unflatten(-1, (-1, self.group_size))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (groups.flatten(-2) * weight).to(dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
