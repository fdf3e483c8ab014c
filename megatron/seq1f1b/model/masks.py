"""Attention masks that a program gives: they must be plain causal attention, or keep documents apart.

Tested in runtime/test_masks.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# What to do about documents that a mask keeps apart.
KEEP_APART = (
    "for packed documents give --reset-attention-mask, or mark them in the call of the model on the first stage, too"
)

_ROWS_AT_ONCE = 1024  # of a mask


class _Comparison(NamedTuple):
    """Whether a mask differs from causal attention, a boolean on its device, and its name in errors."""

    differs: Tensor
    where: str


class MaskCheck:
    """Compares masks with causal attention; only `settle` reads results of a GPU, so nothing waits before."""

    def __init__(self) -> None:
        self._unread: list[_Comparison] = []

    def require_causal(self, mask: Any, length: int, where: str) -> None:
        """Raise ValueError unless a mask of sequences of `length` (s) tokens hides nothing but later tokens and padding
        at the end: booleans [..., s, s], True where hidden, or of padding alone, [b, s], True for tokens, as Hugging
        Face's models take it, or [b, 1, 1, s], True for padding, as Megatron's. `where` names it in the error; `settle`
        raises it for a GPU's."""
        if not isinstance(mask, Tensor) or mask.shape[-1] != length:
            return
        if mask.dim() > 2 and mask.shape[-2] == length:
            is_other = differs(mask.bool().reshape(-1, length, length))
        else:
            is_padding = ~mask.bool() if mask.dim() == 2 else mask.bool()
            is_other = (is_padding[..., :-1] & ~is_padding[..., 1:]).any()
        self._unread.append(_Comparison(is_other, where))
        if not mask.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Raise ValueError for a mask that is not causal; waits for the GPU if any mask was on it."""
        comparisons = self._unread
        self._unread = []
        if not comparisons or not torch.stack([comparison.differs for comparison in comparisons]).any():
            return
        first = next(comparison.where for comparison in comparisons if comparison.differs)
        raise ValueError(
            f"{first} is not plain causal attention, with padding at the end, and segments of a sequence compute "
            f"nothing else; {KEEP_APART}, or drop --sequence-splits"
        )


def starts_of_documents(hidden: Tensor, where: str) -> Tensor:
    """Which tokens are the first of a document, booleans [b, s] on the CPU, by a mask `hidden` [b, s, s], True where
    hidden. Raises ValueError, which names the mask by `where`, if it hides more or less than other documents, later
    tokens and padding at the end. Waits for the GPU."""
    starts = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    starts[:, 0] = True
    # Tokens that see themselves, as padding does not, but not the one before them.
    starts[:, 1:] = (hidden.diagonal(-1, 1, 2) & ~hidden.diagonal(0, 1, 2)[:, 1:]).cpu()
    if differs(hidden, starts.cumsum(1).to(hidden.device)):
        raise ValueError(
            f"{where} hides more or less than other documents, later tokens and padding at the end, but segments hide "
            "exactly these; drop --sequence-splits"
        )
    return starts


def differs(mask: Tensor, document: Tensor | None = None) -> Tensor:
    """Whether `mask` [b, s, s], True where hidden, differs from the causal mask, or from that within documents if
    `document` [b, s] numbers them for each token: a boolean on its device. Padding at the end may be hidden, too."""
    is_padding = _padding_at_end(mask)
    is_different = is_padding[:, 0].any()  # no token is left
    for first in range(0, mask.shape[-1], _ROWS_AT_ONCE):
        rows = mask[:, first : first + _ROWS_AT_ONCE]
        hidden = torch.ones(rows.shape[1:], dtype=torch.bool, device=mask.device).triu(first + 1)
        if document is not None:
            hidden = hidden | (document[:, first : first + _ROWS_AT_ONCE, None] != document[:, None])
        # What padding sees reaches no token.
        is_token = ~is_padding[:, first : first + _ROWS_AT_ONCE, None]
        is_different |= ((rows != hidden) & is_token).any()
    return is_different


def _padding_at_end(mask: Tensor) -> Tensor:
    """Which of the last tokens are hidden from all, by `mask` [b, s, s], True where hidden: booleans [b, s]."""
    is_hidden = mask.all(1)
    num_hidden_behind = is_hidden.flip(1).cumsum(1).flip(1)
    num_behind = torch.arange(mask.shape[-1], 0, -1, device=mask.device)
    return num_hidden_behind == num_behind
