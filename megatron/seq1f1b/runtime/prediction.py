"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the stage of its layers, and the tokens after those of this
rank, which these layers read and predict."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import LayerType
from torch import Tensor

from ..model import LookAhead, PredictionHeads, Segment, SegmentContext
from ..process.patches import PatchTable
from ..schedule import Placement
from .data import SegmentIterator
from .step import Step

_ENTRIES = ("tokens", "position_ids", "labels", "loss_mask")


def prediction_stage(config: Any, placement: Placement) -> int | None:
    """The stage with the layers of multi-token prediction: the last unless a layout places them; None without them."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return placement.num_stages - 1
    ranks = placement.num_ranks
    return next(
        stage for stage in range(placement.num_stages) if LayerType.mtp in layout.layout[stage % ranks][stage // ranks]
    )


def rows_per_token(config: Any, placement: Placement, stage: int) -> int:
    """Rows of activations that `stage` sends for a token: after multi-token prediction, one more for each depth."""
    predicting = prediction_stage(config, placement)
    return 1 if predicting is None or stage < predicting else 1 + config.mtp_num_layers


def prediction_patches(step: Step, context: SegmentContext) -> PatchTable:
    """The patches of a rank with the layers of multi-token prediction, or with its loss; empty elsewhere."""
    placement = step.placement
    predicting = prediction_stage(step.config, placement)
    stages = set() if predicting is None else {predicting, placement.num_stages - 1}
    readers = [step.batches[placement.chunk_of(stage)] for stage in stages if placement.rank_of(stage) == step.rank]

    def ahead(segment: Segment) -> LookAhead:
        running = next(each for each in readers if each is None or each.segment is segment)
        return look_ahead(running, segment, step)

    return PredictionHeads(context, ahead, step.groups.cp.size()).patches() if readers else ()


def look_ahead(batches: SegmentIterator | None, segment: Segment, step: Step) -> LookAhead:
    """The LookAhead of a segment, called on all tensor-parallel ranks of a stage; the first has the `batches`, dicts
    with tokens, position_ids and labels, and broadcasts.

    As in Megatron, predictions stay within documents only in batches of its packed format, which have `cu_seqlens`.
    """
    depth, tensor, runs = step.config.mtp_num_layers, step.groups.tp, _runs(segment, step.groups.cp)
    number = torch.zeros(step.micro_batch_size, segment.sequence_length, dtype=torch.long)  # of each token's document
    for row, starts in zip(number, segment.documents or (), strict=False):
        row[list(starts)] = 1
    number = number.cumsum(dim=1)
    shape = len(_ENTRIES), len(runs), step.micro_batch_size, depth
    packed = torch.empty(prod(shape) + depth + 2, dtype=torch.float64, device=step.device)
    if tensor.rank() == 0:
        packed.copy_(_packed(batches.latest, number, [end for _, end in runs], depth), non_blocking=True)
    if tensor.size() > 1:
        dist.broadcast(packed, dist.get_global_rank(tensor, 0), group=tensor)
    entries, counts, stays_within = packed.split((packed.numel() - depth - 2, depth + 1, 1))
    ends_document = None
    if segment.documents is not None:
        is_last = torch.nn.functional.pad(number[:, 1:] != number[:, :-1], (0, 1))
        of_runs = torch.cat([is_last[:, start:end] for start, end in runs], dim=1)
        ends_document = of_runs.to(step.device, non_blocking=True) & (stays_within > 0)
    return LookAhead(dict(zip(_ENTRIES, entries.view(shape), strict=True)), counts, ends_document)


def _runs(segment: Segment, context: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Start and end of the runs of tokens of this rank in the sequence, see model/head_exchange.py."""
    if context.size() == 1:
        return [(segment.start, segment.end)]
    part = segment.length // (2 * context.size())
    first, last = segment.start + context.rank() * part, segment.end - context.rank() * part
    return [(first, first + part), (last - part, last)]


def _packed(batch: Any, number: Tensor, ends: Sequence[int], depth: int) -> Tensor:
    """The message of `look_ahead`, in numbers that fp64 holds exactly: entries that follow the `ends` of runs, sums of
    the shifted loss mask, and whether both stay within documents of one `number` [b, s]."""
    entries = dict(batch)
    if entries.get("loss_mask") is None:
        entries["loss_mask"] = torch.ones_like(entries["labels"])
    stays_within = any("cu_seqlens" in name for name in entries)
    if not stays_within:
        number = torch.zeros_like(number)
    parts = []
    for name in _ENTRIES:
        for end in ends:
            is_same = number[:, end : end + depth] == number[:, end - 1 : end]
            following = entries[name][:, end : end + depth].double().cpu() * is_same
            parts.append(torch.nn.functional.pad(following, (0, depth - following.shape[1])).flatten())
    mask, length = entries["loss_mask"].double().cpu(), number.shape[1]
    for shift in range(depth + 1):
        is_same = number[:, shift:] == number[:, : length - shift]
        parts.append((mask[:, shift:] * is_same).sum().view(1))
    return torch.cat((*parts, torch.tensor([float(stays_within)])))
