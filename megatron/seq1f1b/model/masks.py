"""Comparison of attention masks with the attention of segments."""

import torch
from torch import Tensor

KEEP_APART = "for packed documents give --reset-attention-mask"

_ROWS_AT_ONCE = 1024


class MaskCheck:
    """Compares masks with causal attention; only `settle` reads results of a GPU, so nothing waits before."""

    def __init__(self) -> None:
        self._doubts: list[tuple[Tensor, str]] = []

    def require_causal(self, mask: Tensor, where: str, may_be_inverted: bool = False) -> None:
        """Raise ValueError unless `mask`, booleans [..., s, s], hides from each token exactly those after it.

        `may_be_inverted` also accepts a mask that shows exactly those. `where` names the mask in the error, which
        `settle` raises if the mask is on a GPU.
        """
        mask = mask.bool().view(-1, *mask.shape[-2:])
        doubt = differs(mask)
        if may_be_inverted:
            doubt &= differs(~mask)
        self._doubts.append((doubt, where))
        if not mask.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Raise ValueError for a mask that is not causal; waits for the GPU if any mask was on it."""
        doubts, self._doubts = self._doubts, []
        if doubts and torch.stack([doubt for doubt, _ in doubts]).any():
            raise ValueError(
                f"{next(where for doubt, where in doubts if doubt)} is not plain causal attention, and segments of a "
                f"sequence compute nothing else; {KEEP_APART}, or drop --sequence-splits"
            )


def differs(mask: Tensor, document: Tensor | None = None) -> Tensor:
    """Whether `mask` [b, s, s] differs from causal attention, which hides later tokens: a boolean on its device.

    With `document` [b, s], the number of each token's document, other documents are to be hidden, too.
    """
    found = torch.zeros((), dtype=torch.bool, device=mask.device)
    for first in range(0, mask.shape[-1], _ROWS_AT_ONCE):
        rows = mask[:, first : first + _ROWS_AT_ONCE]
        hidden = torch.ones(rows.shape[1:], dtype=torch.bool, device=mask.device).triu(first + 1)
        if document is not None:
            hidden = hidden | (document[:, first : first + _ROWS_AT_ONCE, None] != document[:, None])
        found |= (rows != hidden).any()
    return found
