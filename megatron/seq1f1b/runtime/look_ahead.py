"""The tokens right after a segment, which multi-token prediction reads and predicts (DeepSeek-V3, arXiv 2412.19437)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Segment
from .data import SegmentIterator

_ENTRIES = ("tokens", "position_ids", "labels", "loss_mask")


@dataclass(frozen=True)
class LookAhead:
    """What follows a segment of b sequences: `entries[name]` [b, depth], zeros beyond the end of the sequence.

    `counts[d]` is the sum of the loss mask of the whole micro-batch after it has been shifted by d tokens.
    """

    entries: dict[str, Tensor]
    counts: Tensor


def look_ahead(
    batches: SegmentIterator | None,
    segment: Segment,
    num_sequences: int,
    depth: int,
    tensor: dist.ProcessGroup,
    device: torch.device,
) -> LookAhead:
    """For the last stage, of whose tensor-parallel ranks the first has the `batches`; called on all of them.

    One small message tells the others. Raises ValueError if a batch is no dict with tokens, position_ids and labels.
    """
    shape = len(_ENTRIES), num_sequences, depth
    packed = torch.empty(shape[0] * num_sequences * depth + depth + 1, dtype=torch.float64, device=device)
    if tensor.rank() == 0:
        packed.copy_(_packed(batches.latest, segment, shape), non_blocking=True)
    if tensor.size() > 1:
        dist.broadcast(packed, dist.get_global_rank(tensor, 0), group=tensor)
    entries, counts = packed.split((packed.numel() - depth - 1, depth + 1))
    return LookAhead(dict(zip(_ENTRIES, entries.view(shape), strict=True)), counts)


def _packed(batch: Any, segment: Segment, shape: tuple[int, int, int]) -> Tensor:
    """All that there is to tell, as numbers that fp64 holds exactly."""
    entries = dict(batch) if isinstance(batch, dict) else {}
    missing = [name for name in _ENTRIES[:3] if entries.get(name) is None]
    if missing:
        raise ValueError(
            f"multi-token prediction looks ahead of a segment, but a batch has no {', '.join(missing)}; drop "
            "--sequence-splits or --mtp-num-layers"
        )
    if entries.get("loss_mask") is None:
        entries["loss_mask"] = torch.ones_like(entries["labels"])
    ahead = torch.zeros(shape, dtype=torch.float64)
    after = slice(segment.end, segment.end + shape[-1])
    for found, name in zip(ahead, _ENTRIES, strict=True):
        part = entries[name][:, after]
        found[:, : part.shape[1]] = part
    counts = torch.stack([entries["loss_mask"][:, shift:].sum(dtype=torch.float64) for shift in range(shape[-1] + 1)])
    return torch.cat((ahead.flatten(), counts.cpu()))
