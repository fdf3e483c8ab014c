"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the stage of its layers, and the tokens after those of this
rank, which these layers read and predict.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import LayerType
from torch import Tensor

from ...model import LookAhead, PredictionHeads, Run, Segment, SegmentContext, parts_of_rank
from ...process.patches import PatchTable
from ...schedule import Placement
from ..model_calls.call_arguments import Arguments
from ..model_calls.calls import Calls
from ..step import Step

# Arguments of the model that these layers read further on.
_ENTRIES = ("input_ids", "position_ids", "labels", "loss_mask")


def prediction_stage(config: Any, placement: Placement) -> int | None:
    """The stage with the layers of multi-token prediction: the last unless a layout places them; None without them."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return placement.num_stages - 1
    for stage in range(placement.num_stages):
        chunk, rank = divmod(stage, placement.num_ranks)  # as Megatron's layout counts, whatever our placement
        if LayerType.mtp in layout.layout[rank][chunk]:
            return stage
    raise ValueError("the layout of a model with multi-token prediction has no stage for its layers")


def rows_per_token(config: Any, placement: Placement, stage: int) -> int:
    """Rows of activations that `stage` sends for a token: after multi-token prediction, one more for each depth."""
    predicting = prediction_stage(config, placement)
    return 1 if predicting is None or stage < predicting else 1 + config.mtp_num_layers


def prediction_patches(step: Step, context: SegmentContext, calls: Calls) -> PatchTable:
    """The patches of a rank with the layers of multi-token prediction, or with its loss; empty elsewhere."""
    placement = step.placement
    predicting = prediction_stage(step.config, placement)
    if predicting is None:
        return ()
    ranks = {placement.rank_of(stage) for stage in (predicting, placement.num_stages - 1)}
    if step.rank not in ranks:
        return ()

    def ahead(segment: Segment) -> LookAhead:
        return look_ahead(calls.running.arguments, segment, step)

    return PredictionHeads(context, ahead, step.groups.cp.size()).patches()


def look_ahead(arguments: Arguments, segment: Segment, step: Step) -> LookAhead:
    """The LookAhead of a segment, from the arguments of the call with the whole micro-batch.

    As in Megatron, predictions stay within documents only if the call has `packed_seq_params`.
    """
    depth = step.config.mtp_num_layers
    num_sequences = step.num_sequences[segment.microbatch]
    entries = arguments.by_name()
    if entries.get("loss_mask") is None:
        entries["loss_mask"] = torch.ones(num_sequences, segment.sequence_length, device=step.device)
    stays_within = entries.get("packed_seq_params") is not None and segment.documents is not None
    if stays_within:
        document = _numbers_of_documents(segment)
    else:  # predictions pass from document to document, as if there were one
        document = torch.zeros(num_sequences, segment.sequence_length, dtype=torch.long)
    document = document.to(step.device, non_blocking=True)
    runs = _runs(segment, step.groups.cp)
    following = {}
    for name in _ENTRIES:
        entry = entries.get(name)
        if entry is not None:
            following[name] = torch.stack([_following(entry, end, depth, document) for _, end in runs])
    ends_document = None
    if stays_within:
        is_last = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (0, 1))
        ends_document = torch.cat([is_last[:, start:end] for start, end in runs], dim=1)
    return LookAhead(following, _counts(entries["loss_mask"], depth, document), ends_document)


def _numbers_of_documents(segment: Segment) -> Tensor:
    """The number of the document of each token of the micro-batch, [b, s]."""
    documents = segment.documents or ()
    is_start = torch.zeros(len(documents), segment.sequence_length, dtype=torch.long)
    for row, starts in zip(is_start, documents, strict=True):
        row[list(starts)] = 1
    return is_start.cumsum(dim=1)


def _counts(mask: Tensor, depth: int, document: Tensor) -> Tensor:
    """The sums of a loss mask [b, s], shifted by 0 to `depth` tokens that stay in their document."""
    length = mask.shape[1]
    counts = []
    for shift in range(depth + 1):
        is_same = document[:, shift:] == document[:, : length - shift]
        counts.append((mask[:, shift:] * is_same).double().sum())
    return torch.stack(counts)


def _following(entry: Tensor, end: int, depth: int, document: Tensor) -> Tensor:
    """The `depth` columns of an entry [b, s] behind `end`, zeros beyond the sequence and in another document."""
    is_same = document[:, end : end + depth] == document[:, end - 1 : end]
    columns = entry[:, end : end + depth] * is_same
    return torch.nn.functional.pad(columns, (0, depth - columns.shape[1]))


def _runs(segment: Segment, context: dist.ProcessGroup) -> Sequence[Run]:
    """The runs of tokens of this rank in the sequence."""
    run = (segment.start, segment.end)
    return [run] if context.size() == 1 else parts_of_rank(run, context.rank(), context.size())
