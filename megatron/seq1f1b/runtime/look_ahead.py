"""The tokens right after those of a rank, which multi-token prediction reads and predicts (DeepSeek-V3, arXiv
2412.19437)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Segment
from .data import SegmentIterator

_ENTRIES = ("tokens", "position_ids", "labels", "loss_mask")


@dataclass(frozen=True)
class LookAhead:
    """What follows each of the r runs of tokens that a rank has of a segment of b sequences: `entries[name]`
    [r, b, depth], zeros beyond the end of the sequence.

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
    context: dist.ProcessGroup,
    device: torch.device,
) -> LookAhead:
    """For a stage of whose tensor-parallel ranks the first has the `batches`; called on all of them.

    A context-parallel rank has two runs of tokens, see model/head_exchange.py. One small message tells the others.
    Raises ValueError if a batch is no dict with tokens, position_ids and labels.
    """
    ends = _ends(segment, context)
    shape = len(_ENTRIES), len(ends), num_sequences, depth
    packed = torch.empty(prod(shape) + depth + 1, dtype=torch.float64, device=device)
    if tensor.rank() == 0:
        packed.copy_(_packed(batches.latest, ends, shape), non_blocking=True)
    if tensor.size() > 1:
        dist.broadcast(packed, dist.get_global_rank(tensor, 0), group=tensor)
    entries, counts = packed.split((packed.numel() - depth - 1, depth + 1))
    return LookAhead(dict(zip(_ENTRIES, entries.view(shape), strict=True)), counts)


def _ends(segment: Segment, context: dist.ProcessGroup) -> list[int]:
    """Where in the sequence the runs of tokens of this rank end."""
    if context.size() == 1:
        return [segment.end]
    part = segment.length // (2 * context.size())
    return [segment.start + (context.rank() + 1) * part, segment.end - context.rank() * part]


def _packed(batch: Any, ends: Sequence[int], shape: tuple[int, ...]) -> Tensor:
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
    for of_entry, name in zip(ahead, _ENTRIES, strict=True):
        for found, end in zip(of_entry, ends, strict=True):
            part = entries[name][:, end : end + shape[-1]]
            found[:, : part.shape[1]] = part
    counts = torch.stack([entries["loss_mask"][:, shift:].sum(dtype=torch.float64) for shift in range(shape[-1] + 1)])
    return torch.cat((ahead.flatten(), counts.cpu()))
