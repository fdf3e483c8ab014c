"""The routes that a program replays or records in one call: whole micro-batches on its side, segments on ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from ...model import Segment, routes_set_for
from .context_shares import ContextShares


class RoutesOfCall:
    """What the routers of a `model` are told for one call.

    `shares` are those of context-parallel ranks, and `sequence_parallel` is a group whose ranks divide the tokens of
    activations; None without them. Making it is a collective of both groups.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shares: ContextShares | None,
        sequence_parallel: dist.ProcessGroup | None,
    ) -> None:
        # Not methods of this object, which would be in a reference cycle with its routes, and outlive the step.
        self._division = _Division(shares, sequence_parallel)
        self.by_router = routes_set_for(model, self._division.part)
        for routes in self.by_router.values():
            routes.given = {name: self._division.whole(rows) for name, rows in routes.given.items()}

    def return_recorded(self, segments: Sequence[Segment]) -> None:
        """Let the program find the routes of all `segments` where it expects those of the micro-batch. A collective."""
        for router, routes in self.by_router.items():
            if routes.recorded:
                rows = [routes.recorded[segment.index] for segment in segments]
                router.router_replay.recorded_topk_idx = self._division.joined(rows, segments)
                routes.recorded.clear()


@dataclass(frozen=True)
class _Division:
    """How ranks divide the rows of a micro-batch, one for each token, as the arguments of `RoutesOfCall` say."""

    shares: ContextShares | None
    sequence_parallel: dist.ProcessGroup | None

    def whole(self, rows: Tensor) -> Tensor:
        """The rows of all tokens in order, of those that this rank has as the program divides tokens."""
        if self.sequence_parallel is not None:
            rows = _in_bytes(self._gathered, rows)
        shares = self.shares
        if shares is not None:
            rows = _by_tokens(lambda tokens: shares.gathered(tokens, 0), rows, shares.num_own)
        return rows

    def part(self, whole: Tensor, segment: Segment) -> Tensor:
        """This rank's rows of a segment."""

        def of_segment(tokens: Tensor) -> Tensor:
            if self.shares is not None:
                return self.shares.part(tokens, 0, segment)
            return tokens.narrow(0, segment.start, segment.length)

        return self._divided(_by_tokens(of_segment, whole, segment.sequence_length))

    def joined(self, rows: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
        """This rank's rows as the program divides tokens, of those of all segments."""
        if self.sequence_parallel is not None:
            rows = [_in_bytes(self._gathered, of_segment) for of_segment in rows]
        joined = torch.cat(list(rows))
        shares = self.shares
        if shares is not None:
            joined = _by_tokens(lambda tokens: shares.rearranged(tokens, 0, segments), joined, shares.num_own)
        return self._divided(joined)

    def _gathered(self, rows: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(
            rows, tensor_parallel_output_grad=False, group=self.sequence_parallel
        )

    def _divided(self, rows: Tensor) -> Tensor:
        """The rows of this rank of a group that divides activations."""
        group = self.sequence_parallel
        return rows if group is None else rows.chunk(group.size())[group.rank()]


def _by_tokens(function: Callable[[Tensor], Tensor], rows: Tensor, num_tokens: int) -> Tensor:
    """`function` of rows [s b, ...] as [s, b n], for s tokens of each sequence and n bytes a row."""
    width = rows[:1].numel() * rows.element_size()
    return _in_bytes(lambda flat: function(flat.reshape(num_tokens, -1)).reshape(-1, width), rows)


def _in_bytes(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`function` of rows as bytes [rows, n]: groups exchange few types of whole numbers."""
    flat = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    return function(flat).contiguous().view(rows.dtype).reshape(-1, *rows.shape[1:])
