"""Rotary positions of a segment, which begin anew with each document; Megatron's begin at 0.

Tested in model/test_attach.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from ...process.patches import wrapping
from ..packed_documents import Piece, pieces
from ..segment import Segment


def _at_segment(rotary: RotaryEmbedding, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Angles of the running segment, which model chunks share: 4·d bytes a token, for d rotary dimensions."""
    segment = rotary.segment_context.segment
    if segment is None:
        return forward(*args, **kwargs)
    of_documents = partial(_of_documents, segment, rotary, forward, *args, **kwargs)
    if isinstance(rotary, YarnRotaryEmbedding):  # also returns a scale, a number, which cannot be shared
        return of_documents()
    return segment.shared((rotary.path_in_chunk, *args, *kwargs.items()), of_documents)


def _of_documents(
    segment: Segment,
    rotary: RotaryEmbedding,
    forward: Callable[..., Any],
    length: int,
    packed_seq: bool = False,
    cp_group: Any = None,
) -> Any:
    """Positions count from the start of a document, as rounding errors of angles in fp32 grow with them. They count
    from that of the sequence if several sequences share them: attention depends on differences only."""
    documents = [Piece(0, segment.start, segment.start + length)]
    if segment.documents is not None and len(segment.documents) == 1 and length == segment.length:
        documents = pieces(segment.documents[0], segment.start, segment.end)
    (first_key, start, end), *others = documents
    if not others:
        return forward(length, offset=start - first_key, packed_seq=packed_seq, cp_group=cp_group)
    # The others begin at 0 and share a table, which is not yet divided among context-parallel ranks.
    lengths = [piece.end - piece.start for piece in others]
    of_first = forward(end - start, offset=start - first_key, packed_seq=True)
    table = forward(max(lengths), packed_seq=True)
    scale = None
    if isinstance(rotary, YarnRotaryEmbedding):
        of_first, scale = of_first
        table, _ = table
    angles = torch.cat([of_first, *(table[:length] for length in lengths)])
    group = cp_group or rotary.cp_group
    if group is not None and group.size() > 1 and not packed_seq:
        angles = get_pos_emb_on_this_cp_rank(angles, 0, group)
    return angles if scale is None else (angles, scale)


def _cosines_and_sines(
    rotary: YarnRotaryEmbedding, cached: Callable, length: int, *, dtype: torch.dtype, packed_seq: bool = False
) -> tuple[Tensor, ...]:
    """Cosines and sines for the fused rotary embedding of multi-latent attention."""
    segment = rotary.segment_context.segment
    if segment is None:
        return cached(length, dtype=dtype, packed_seq=packed_seq)

    def of_angles(function: Callable[[Tensor], Tensor]) -> Tensor:
        angles, scale = rotary(length, packed_seq=packed_seq)
        return (function(angles) * scale).to(dtype)

    def shared(function: Callable[[Tensor], Tensor]) -> Tensor:
        key = (rotary.path_in_chunk, length, dtype, packed_seq, function)
        return segment.shared(key, partial(of_angles, function))

    return shared(torch.cos), shared(torch.sin)


_EMBEDDINGS = "megatron.core.models.common.embeddings"
_YARN = f"{_EMBEDDINGS}.yarn_rotary_pos_embedding.YarnRotaryEmbedding"
SEGMENT_PATCHES = (
    wrapping(f"{_EMBEDDINGS}.rotary_pos_embedding.RotaryEmbedding.forward", _at_segment, "begins at position 0"),
    wrapping(f"{_YARN}.get_cached_cos_sin", _cosines_and_sines, "keeps one table, which begins at 0"),
)
