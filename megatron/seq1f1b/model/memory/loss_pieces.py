"""The loss of a segment without its logits: computed in pieces of tokens, and again in the backward.

The last stage runs all forwards of a micro-batch before its first backward. Logits take 4·s·b·V/t bytes there, whatever
the number of segments: 64 GiB for a million tokens, a vocabulary of 128k and 8 tensor-parallel ranks. Instead the stage
keeps hidden states, 2·s·b·h/t bytes with sequence parallelism, and the backward repeats a product of 2·s·b·h·V/t FLOPs.
Megatron's own output layer and cross entropy compute each piece. Its weight gradient comes with its input gradient, in
I if backwards are split: in W it would need the logits once more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...process.patches import patched_on, wrapping
from .main_grad import accumulated, exact_main_grad, new_sum
from .token_logits import PIECE, Head, PieceLogits

# As many pieces of logits, 2 GiB, or fewer are kept, since the repeated product can take a tenth of the last stage of a
# small model.
MOST_PIECES_KEPT = 8
_LOSS = "megatron.core.models.common.language_module.language_module.LanguageModule.compute_language_model_loss"


def compute_loss_in_pieces(chunks: Iterable[torch.nn.Module], num_tokens: int, piece: int | None = PIECE) -> None:
    """Make model chunks with an output layer compute their losses in pieces of `piece` logits. Logits are kept if
    `piece` is None, or if the `num_tokens` of a micro-batch on this context-parallel rank have at most
    `MOST_PIECES_KEPT` pieces. The latest call wins."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        if not isinstance(model, LanguageModule):
            continue
        layer: Any = getattr(model, "output_layer", None)
        if not isinstance(layer, ColumnParallelLinear) or layer.gather_output:
            continue
        if not hasattr(layer, "logits_per_piece"):
            patched_on([layer], [wrapping("torch.nn.Module.forward", _logits, "computes all logits at once")])
            patched_on([model], [wrapping(_LOSS, _loss, "keeps all logits for the backward")])
        heads = 1 + (model.config.mtp_num_layers or 0)
        num_logits = heads * num_tokens * layer.output_size_per_partition
        has_many = piece is not None and num_logits > MOST_PIECES_KEPT * piece
        layer.logits_per_piece = piece if has_many else None
        # Its gradient has no memory while the chunk does not run.
        layer.gradient_is_away = hasattr(chunk, "partitioned_state")


def computes_in_pieces(layer: torch.nn.Module) -> bool:
    """Whether a layer is an output layer that computes its logits in pieces."""
    return getattr(layer, "logits_per_piece", None) is not None


def _logits(
    layer: ColumnParallelLinear,
    forward: Callable,
    input_: Tensor,
    weight: Any = None,
    runtime_gather_output: Any = None,
) -> tuple:
    if not computes_in_pieces(layer) or runtime_gather_output:
        return forward(input_, weight, runtime_gather_output)
    weight = layer.weight if weight is None else weight
    if weight is not layer.weight:  # that of an embedding, which gives it an ordinary gradient
        weight.zero_out_wgrad = True
    num_runs = layer.tp_group.size() if layer.sequence_parallel else 1
    shape = torch.Size((num_runs * len(input_), input_.shape[1], layer.output_size_per_partition))
    length = max(1, layer.logits_per_piece // (num_runs * shape[1:].numel()))
    return Logits(
        compute=lambda hidden, weight: forward(hidden, weight)[0],
        layer=layer,
        hidden=input_,
        weight=weight,
        num_runs=num_runs,
        length=length,
        shape=shape,
    ), None


def _loss(model: LanguageModule, loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor, logits: Any) -> Tensor:
    return logits.loss(labels, loss) if isinstance(logits, Logits) else loss(labels, logits)


@dataclass(frozen=True)
class Logits:
    """Logits [n, b, V/t], computed when needed, in pieces for `loss` and `max`, else whole, by
    `compute(hidden, weight)`, which includes the `factor`. Each of `num_runs` ranks has one run of the tokens, as
    `hidden` states [n/t, b, h]; the `weight` [V/t, h] is that of the layer. A piece has `length` tokens of each run."""

    compute: Callable[[Tensor, Tensor], Tensor]
    layer: ColumnParallelLinear
    hidden: Tensor
    weight: Tensor
    num_runs: int
    length: int
    shape: torch.Size
    factor: float = 1.0

    def loss(self, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`loss(labels, logits)` [b, n] for labels [b, n]; its backward computes the logits again."""
        # Without `self`, which would keep the hidden states from moving to the host.
        compute = self.compute
        num_runs = self.num_runs

        def by_place(tokens: Tensor) -> Tensor:
            """[n/t, b, t] of [b, n]: the runs side by side, so that a piece is a part of the first dimension."""
            return tokens.unflatten(1, (num_runs, -1)).movedim(-1, 0)

        def of_piece(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return by_place(loss(labels.movedim(0, -1).flatten(1), compute(hidden, weight)))

        losses = _LossOfPieces.apply(of_piece, self.length, self.hidden, self.weight, by_place(labels))
        # Programs view losses as one dimension, as they may those of Megatron.
        return losses.movedim(0, -1).flatten(1).contiguous()

    def max(self, dim: int) -> tuple[Tensor, ...]:
        """The largest logit of each token and its index [n, b], from which Megatron counts correct predictions."""
        weight = self._weight_of_kept()
        values = []
        indices = []
        for hidden in self.hidden.split(self.length):
            largest, index = self.compute(hidden, weight).max(dim=dim)
            values.append(largest.unflatten(0, (self.num_runs, -1)))
            indices.append(index.unflatten(0, (self.num_runs, -1)))
        # A piece has some tokens of every run, so each run is joined by itself.
        return torch.cat(values, dim=1).flatten(0, 1), torch.cat(indices, dim=1).flatten(0, 1)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __mul__(self, factor: Any) -> "Logits":
        """The maximal update parametrization scales logits (arXiv 2203.03466)."""
        compute = self.compute
        return replace(
            self,
            compute=lambda hidden, weight: compute(hidden, weight) * factor,
            factor=self.factor * factor,
        )

    def transpose(self, first: int, second: int) -> Tensor:
        """Logits [b, n, V/t] for a program that gives no labels."""
        layer = self.layer
        hidden = self.hidden
        if layer.bias is not None or torch.is_autocast_enabled(hidden.device.type) or {first, second} != {0, 1}:
            return self.whole().transpose(first, second)
        head = Head(
            weight=self.weight,
            group=layer.tp_group,
            factor=self.factor,
            piece=layer.logits_per_piece,
            waits=layer.gradient_is_away,
            is_fused=layer.gradient_accumulation_fusion,
        )
        # The backward of either adds up the gradients of the parts of the vocabulary.
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
        return PieceLogits.of(head.hidden(hidden.transpose(0, 1)), head)

    def whole(self) -> Tensor:
        return self.compute(self.hidden, self._weight_of_kept())

    def _weight_of_kept(self) -> Tensor:
        """The weight for logits that are kept for an ordinary backward."""
        weight = _AddedToMainGrad.apply(self.weight)
        if hasattr(self.weight, "main_grad"):
            weight.main_grad = self.weight.main_grad  # for fused products
        return weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = kwargs or {}
        is_argmax = func is torch.argmax and len(args) == 1 and list(options) == ["dim"]  # as Megatron calls it
        if is_argmax:
            _, indices = args[0].max(**options)
            return indices
        whole = [arg.whole() if isinstance(arg, Logits) else arg for arg in args]
        return func(*whole, **options)


class _AddedToMainGrad(torch.autograd.Function):
    """A weight whose gradient is added to its `main_grad` here: pieces mark theirs, and then
    DistributedDataParallel would add no other gradient of the step."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        main_grad = getattr(ctx.weight, "main_grad", None)
        if main_grad is None:
            return grad
        if grad is not None:  # else a fused product has added it
            main_grad += grad
        return accumulated(ctx.weight)


class _LossOfPieces(torch.autograd.Function):
    """`loss(hidden, weight, labels)` of pieces of `length` places, joined; the backward runs each piece forward again.
    Gradients of the weight add up in fp32, in its `main_grad` of Megatron's DistributedDataParallel or in a new one."""

    @staticmethod
    def forward(
        ctx: Any, loss: Callable[..., Tensor], length: int, hidden: Tensor, weight: Tensor, labels: Tensor
    ) -> Tensor:
        ctx.loss = loss
        ctx.length = length
        ctx.weight = weight
        ctx.save_for_backward(hidden, labels)
        parts = zip(hidden.split(length), labels.split(length), strict=True)
        return torch.cat([loss(part, weight, labels_of_part) for part, labels_of_part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Any, ...]:
        hidden, labels = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        weight = ctx.weight
        alias = weight.detach().requires_grad_(weight.requires_grad)  # without hooks
        total = None  # of the gradients that pieces give the weight
        if weight.requires_grad:
            exact = exact_main_grad(weight)
            total = new_sum(weight) if exact is None else exact
            alias.main_grad = total
        of_pieces = (tensor.split(ctx.length) for tensor in (hidden, labels, grad_losses, grad_hidden))
        for part, labels_of_part, grad_of_losses, grad_of_part in zip(*of_pieces, strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                losses = ctx.loss(part, alias, labels_of_part)
            losses.backward(grad_of_losses)
            grad_of_part.copy_(part.grad)
            if alias.grad is not None:  # None if Megatron's layer has added it to `main_grad` by itself
                alias.main_grad += alias.grad
                alias.grad = None
        return None, None, grad_hidden, _gradient_to_return(weight, total), None


def _gradient_to_return(weight: Tensor, total: Tensor | None) -> Tensor | None:
    """The gradient that a backward returns for a weight, from the sum of its pieces; None for a frozen weight. If the
    weight has a `main_grad`, the sum is added to that, and autograd gets what `accumulated` makes of it."""
    if total is None:
        return None
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return total.to(weight.dtype)
    if total is not main_grad:  # whose type is too short for sums of pieces
        main_grad += total
    return accumulated(weight)
