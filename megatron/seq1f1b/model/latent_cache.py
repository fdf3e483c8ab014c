"""What multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) keeps from segment to segment: the latents
that keys and values are projected from, and the rotary part of the keys, which all heads share.

A segment projects the latents of its prefix up again, with its own and in the same product, so that a linear layer of
any kind computes all gradients in its own backward. Between segments there are r + p numbers a token instead of
h·(d + e): for the sizes of DeepSeek-V3, 576 instead of 40960.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Kernel, Saved
from .segment import Segment


class LatentCache:
    """Latents [S, b, r] and rotary keys [S, b, p] of one layer and one micro-batch, and their gradients.

    `project_up` is the layer's projection, from latents [m, b, r] to the keys without positions and the values of all
    heads, [m, b, h·(d + e)].
    """

    def __init__(self, sequence_length: int, project_up: Callable[[Tensor], tuple[Tensor, Any]], size: int) -> None:
        self._project_up = project_up
        self._size = size  # d
        self.latents = Prefix(sequence_length)
        self.rotary = Prefix(sequence_length)
        # Of the running segment: its tokens and those before it projected up, and the latter as a part of the graph.
        self._projected: tuple[Tensor, Tensor] | None = None

    def project(self, joined: Tensor, segment: Segment) -> tuple[Tensor, Any]:
        """The latents [end, b, r] of a segment and its prefix projected up; returns the segment's."""
        output, bias = self._project_up(joined)
        prefix, own = output.split([segment.start, segment.length])
        self._projected = output.detach(), prefix
        return own, bias

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, kernel: Kernel, segment: Segment
    ) -> Tensor:
        """The output [n, b, h·e] of a segment for its query and key [n, b, h, d + p] and value [n, b, h, e]."""
        assert self._projected is not None, "attention without a projection before it"
        projected, prefix = self._projected
        self._projected = None
        return _OneSegment.apply(query, key, value, prefix, sink, projected, kernel, segment, self)

    def write_rotary(self, segment: Segment, key: Tensor) -> None:
        """Keep the last part of a segment's keys [n, b, h, d + p], which is that of any head."""
        self.rotary.write(segment.start, segment.end, key[:, :, 0, self._size :])

    def keys_values(self, projected: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Keys [m, b, h, d + p] and values [m, b, h, e] of the first m tokens."""
        projected = projected.unflatten(2, (heads, -1))
        rotary = self.rotary.read(projected.shape[0]).unsqueeze(2).expand(-1, -1, heads, -1)
        return torch.cat([projected[..., : self._size], rotary], -1), projected[..., self._size :].contiguous()

    def project_again(self, end: int) -> Tensor:
        """The latents of the first `end` tokens, projected up outside any graph."""
        with torch.no_grad():
            return self._project_up(self.latents.read(end))[0]

    def exchange_gradients(
        self, start: int, end: int, own: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Leave the gradients of the rotary keys before a segment, take those that later ones left for its own.

        From the gradients `own` [n, b, h, d + p] of its keys and `prefix`, of the keys and values before them; returns
        the former complete, and the latter as the gradient of the projection [start, b, h·(d + e)].
        """
        left = self.rotary.take_gradients(start, end)
        if left is not None:
            own = own.clone()
            own[:, :, 0, self._size :] += left  # the gradients of all heads add up to that of what they share
        if prefix is None:
            return own, None
        keys, values = prefix
        self.rotary.add_gradients(keys[..., self._size :].sum(2))
        return own, torch.cat([keys[..., : self._size], values], -1).flatten(2)


class Prefix:
    """One tensor [S, b, d], written segment by segment, and the sums of its gradients in at least fp32."""

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._rows: Tensor | None = None
        self._gradients: Tensor | None = None

    def write(self, start: int, end: int, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty((self._length, *rows.shape[1:]))
        self._rows.data[start:end].copy_(rows.detach())

    def read(self, end: int) -> Tensor:
        """The first rows, with a version of their own: later segments write others, which autograd would take for a
        modification."""
        assert self._rows is not None, "segments went forward out of order"
        return self._rows.data[:end]

    def add_gradients(self, prefix: Tensor) -> None:
        """Of the first rows, from a segment that begins behind them."""
        if self._gradients is None:
            self._gradients = prefix.to(torch.promote_types(prefix.dtype, torch.float32))
        else:
            self._gradients = self._gradients[: prefix.shape[0]]
            self._gradients += prefix

    def take_gradients(self, start: int, end: int) -> Tensor | None:
        """Of a segment's own rows, from all later ones."""
        return None if end == self._length or self._gradients is None else self._gradients[start:end]


class _OneSegment(torch.autograd.Function):
    """Attention of one segment; neither its keys and values nor those of its prefix stay, but what they come from."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix: Tensor,
        sink: Tensor | None,
        projected: Tensor,
        kernel: Kernel,
        segment: Segment,
        cache: LatentCache,
    ) -> Tensor:
        cache.write_rotary(segment, key)
        output, statistics = kernel.forward(query, *cache.keys_values(projected, query.shape[2]))
        ctx.save_for_backward(query, output, *statistics)
        ctx.kernel, ctx.segment, ctx.cache = kernel, segment, cache
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        query, output, *statistics = ctx.saved_tensors
        segment, cache = ctx.segment, ctx.cache
        keys, values = cache.keys_values(cache.project_again(segment.end), query.shape[2])
        grads = ctx.kernel.backward(grad_output, Saved(query, keys, values, output, tuple(statistics)))
        own, prefix = cache.exchange_gradients(segment.start, segment.end, grads.key, grads.prefix)
        return grads.query, own, grads.value, prefix, grads.sink, None, None, None, None
