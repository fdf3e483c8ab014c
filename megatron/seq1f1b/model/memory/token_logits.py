"""Logits that a program reads without labels: computed when read, or never, since log-probabilities need only pieces.

Post-training takes log-probabilities of given tokens, and entropies, from the logits of a whole micro-batch. These take
b·s·V/t numbers, in 32 bits for models in 16, and as many for their gradient. `PieceLogits` stands for them: a tensor to
any program, with hidden states, b·s·h numbers, behind it. `token_log_probs` computes pieces of logits from these, and
again in its backward; any other operation computes all logits, once.

The program's backward ends at the joined hidden states, before those of the segments begin. The weight gradient is
complete then; it goes to `main_grad` past the hooks of Megatron's DistributedDataParallel, and the hooks fire when the
segments go backward.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

PIECE = 2**26  # logits: 256 MiB in fp32, and enough rows for a product at full speed

Group = dist.ProcessGroup | None


@dataclass(eq=False)
class Head:
    """The output layer of a model: logits are `factor` times the product of hidden states with the `weight` [V/t, h].

    `group` divides the vocabulary. A piece has `piece` logits. With `waits`, the `main_grad` of the weight may be away
    while the loss goes backward. With `is_fused`, Apex's kernel adds products to it.
    """

    weight: Tensor
    group: Group
    factor: float
    piece: int
    waits: bool
    is_fused: bool

    def __post_init__(self) -> None:
        self._gradient: Tensor | None = None  # until a segment goes backward

    def hidden(self, hidden: Tensor) -> Tensor:
        """Hidden states whose backward gives the weight its gradient."""
        return _WithWeight.apply(self, hidden, self.weight)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., V/t] for hidden states [..., h], without a graph."""
        logits = torch.nn.functional.linear(rows.detach(), self.weight.detach())
        return logits if self.factor == 1.0 else logits * self.factor

    def backward(self, rows: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The gradient of hidden states [n, h], given in pieces; `gradient_of(number, piece)` is that of its logits."""
        of_hidden = rows[0].new_empty((sum(map(len, rows)), rows[0].shape[1]))
        target = self._target() if self.weight.requires_grad else None
        for number, (piece, of_piece) in enumerate(zip(rows, of_hidden.split(len(rows[0])), strict=True)):
            gradient = gradient_of(number, piece)
            if self.factor != 1.0:
                gradient = gradient * self.factor
            gradient = gradient.to(self.weight.dtype)
            torch.matmul(gradient, self.weight.detach(), out=of_piece)
            if target is not None:
                self._add_product(target, gradient, piece)
        return of_hidden

    def take_gradient(self) -> Tensor | None:
        """The gradient for the weight in the backward of a segment; zeros, for the hooks, if `main_grad` has it."""
        if not self.weight.requires_grad:
            return None
        gradient = self._gradient
        self._gradient = None
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            return None if gradient is None else gradient.to(self.weight.dtype)
        if gradient is not None:
            main_grad += gradient
        # Is ignored if an earlier fused product has marked the weight.
        return torch.zeros_like(self.weight)

    def _target(self) -> Tensor:
        """Where products for the weight gradient add up, in fp32 at least."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is not None and main_grad.dtype is dtype and not self.waits:
            return main_grad
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.weight, dtype=dtype)
        return self._gradient

    def _add_product(self, target: Tensor, gradient: Tensor, rows: Tensor) -> None:
        if self.is_fused and target.dtype is torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, gradient, target)
        elif target.dtype is gradient.dtype:
            target.addmm_(gradient.t(), rows)
        else:
            target += gradient.t().matmul(rows)


class PieceLogits(torch.Tensor):
    """Logits [b, n, V/t] of hidden states [b, n, h], without a storage until something reads them."""

    hidden: Tensor
    head: Head
    _whole: list[Tensor]  # one tensor or none, shared with detached ones

    # As torch documents it for subclasses with a dispatch of their own; its stubs have another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(hidden: Tensor, head: Head, dtype: torch.dtype | None = None) -> "PieceLogits":
        """For hidden states that may have a gradient; in the type of these, or in another one."""
        logits = _AsLogits.apply(hidden, head, dtype or hidden.dtype)
        logits.hidden = hidden
        return logits

    def __new__(cls, hidden: Tensor, head: Head, dtype: torch.dtype, whole: list[Tensor]) -> "PieceLogits":
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        self.hidden = hidden
        self.head = head
        self._whole = whole
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the logits have been computed."""
        return bool(self._whole)

    def whole(self) -> Tensor:
        """The logits, without a graph."""
        if not self._whole:
            warnings.warn(
                "the program reads logits of more than 2 GiB, which are computed whole; "
                "megatron.seq1f1b.token_log_probs takes log-probabilities and entropies from them in pieces, and "
                "keep_logits=True (--keep-logits) keeps logits without a warning",
                stacklevel=2,
            )
            self._whole.append(self.head.logits(self.hidden).to(self.dtype))
        return self._whole[0]

    def joined_as(self, hidden: Tensor) -> "PieceLogits":
        """The logits of joined hidden states, of which these are a part."""
        return PieceLogits.of(hidden, self.head, self.dtype)

    def float(self) -> Tensor:  # which Megatron's Float16Module calls for what a model returns
        if self.is_whole or self.dtype is torch.float32:
            return super().float()
        return PieceLogits.of(self.hidden, self.head, torch.float32)

    def data_ptr(self) -> int:  # for kernels in Triton
        return self.whole().data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PieceLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # in torch's stubs it is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            logits = args[0]
            return cls(logits.hidden.detach(), logits.head, logits.dtype, logits._whole)
        given = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        result = func(*given[0], **given[1])
        # An operation in place returns what it has changed.
        is_in_place = args and isinstance(args[0], cls) and result is given[0][0]
        return args[0] if is_in_place else result


class _WithWeight(torch.autograd.Function):
    """Hidden states, whose backward takes the weight gradient from the head."""

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.head = head
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Any, ...]:
        return None, grad_hidden, ctx.head.take_gradient()


class _AsLogits(torch.autograd.Function):
    """Logits for any operation; the backward has their whole gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, dtype: torch.dtype) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(hidden)
        return PieceLogits(hidden, head, dtype, [])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Any, ...]:
        (hidden,) = ctx.saved_tensors
        rows = hidden.flatten(0, -2)
        gradient = grad_logits.flatten(0, -2)
        return ctx.head.backward([rows], lambda number, piece: gradient).view(hidden.shape), None, None


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0, gathered: bool = False) -> Tensor:
    """The log-probabilities [b, s] of tokens [b, s], in fp32 or more, by logits [b, s, V/t] over a temperature.

    The vocabulary is divided among Megatron's tensor-parallel ranks, unless the logits are `gathered`. Tokens outside
    of it, such as -100, get 0. Raises ValueError for tokens of another shape.
    """
    return _values(logits, tokens, temperature, gathered, has_entropy=False)[0]


def token_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, gathered: bool = False
) -> tuple[Tensor, Tensor]:
    """What `token_log_probs` returns, and the entropy [b, s] of each token's distribution in nats, at one go."""
    log_probs, entropy = _values(logits, tokens, temperature, gathered, has_entropy=True)
    return log_probs, entropy


def _values(
    logits: Tensor, tokens: Tensor, temperature: float, gathered: bool, has_entropy: bool
) -> tuple[Tensor, ...]:
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(
            f"log-probabilities are asked for tokens of shape {list(tokens.shape)} by logits of shape "
            f"{list(logits.shape)}; give one token for each position of the logits"
        )
    if isinstance(logits, PieceLogits):
        group = logits.head.group
        if not logits.is_whole:
            source = _OfHidden(logits.head, logits.dtype)
            return _Values.apply(logits.hidden, tokens, source, group, 1 / temperature, has_entropy)
    else:
        is_divided = parallel_state.model_parallel_is_initialized() and not gathered
        group = parallel_state.get_tensor_model_parallel_group() if is_divided else None
    length = max(1, PIECE // logits.shape[-1])
    return _Values.apply(logits, tokens, _OfLogits(length), group, 1 / temperature, has_entropy)


class _OfLogits:
    """Pieces of logits that are there: `length` rows each."""

    def __init__(self, length: int) -> None:
        self.length = length

    def logits(self, rows: Tensor) -> Tensor:
        return rows

    def backward(self, pieces: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        found = pieces[0].new_empty((sum(map(len, pieces)), pieces[0].shape[1]))
        for number, (piece, of_piece) in enumerate(zip(pieces, found.split(self.length), strict=True)):
            of_piece.copy_(gradient_of(number, piece))
        return found


class _OfHidden:
    """Pieces of logits that hidden states give, of a type."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.length = max(1, head.piece // head.weight.shape[0])
        self.backward = head.backward
        self._head = head
        self._dtype = dtype

    def logits(self, rows: Tensor) -> Tensor:
        return self._head.logits(rows).to(self._dtype)


class _Values(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies, by pieces of logits `z = source.logits(rows)` of [..., features].

    With p = exp(z - log_sum), the gradient of a log-probability is 1 - p at the token and -p elsewhere, and that of the
    entropy H is -p·(log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, tokens: Tensor, source: Any, group: Group, scale: float, has_entropy: bool
    ) -> tuple[Tensor, ...]:
        rows = tensor.detach().flatten(0, -2)
        flat = tokens.flatten()
        pieces = zip(rows.split(source.length), flat.split(source.length), strict=True)
        found = [_values_of_piece(_scaled(source.logits(piece), scale), of, group, has_entropy) for piece, of in pieces]
        log_probs, entropies, log_sums, are_known = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.source = source
        ctx.group = group
        ctx.scale = scale
        ctx.has_entropy = has_entropy
        ctx.save_for_backward(tensor, flat, log_sums, entropies, are_known)
        log_probs = log_probs.view(tokens.shape)
        return (log_probs, entropies.view(tokens.shape)) if has_entropy else (log_probs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensor, tokens, log_sums, entropies, are_known = ctx.saved_tensors
        source = ctx.source
        scale = ctx.scale
        rows = tensor.detach().flatten(0, -2)
        parts = [each.flatten().split(source.length) for each in (tokens, log_sums, entropies, are_known, *gradients)]

        def gradient_of(number: int, piece: Tensor) -> Tensor:
            of_piece, log_sum, entropy, is_known, of_log_prob, *of_entropy = (each[number] for each in parts)
            logits = _scaled(source.logits(piece), scale)
            place, is_here = _place(of_piece, logits.shape[-1], ctx.group)
            probs = (logits - log_sum[:, None]).exp_()
            of_log_prob = of_log_prob * is_known
            found = probs * -of_log_prob[:, None]
            found.scatter_add_(-1, place[:, None], (of_log_prob * is_here)[:, None])
            if ctx.has_entropy:
                found += (torch.special.entr(probs) - probs * entropy[:, None]) * of_entropy[0][:, None]
            return found if scale == 1.0 else found.mul_(scale)

        found = source.backward(rows.split(source.length), gradient_of)
        return found.view(tensor.shape), None, None, None, None, None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits * scale


def _values_of_piece(logits: Tensor, tokens: Tensor, group: Group, has_entropy: bool) -> tuple[Tensor, ...]:
    """For logits [n, V/t] the log-probabilities of tokens and the entropies, zeros if not asked for, the logarithms of
    the sums of powers, and whether the vocabulary has the token: [n] each."""
    largest = logits.amax(-1)
    if _is_divided(group):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits - largest[:, None]
    place, is_here = _place(tokens, logits.shape[-1], group)
    of_tokens = torch.where(is_here, logits.gather(-1, place[:, None])[:, 0], 0)
    powers = logits.exp_()  # in place, as nothing reads the differences again
    sums = [powers.sum(-1), of_tokens, is_here.to(of_tokens)]
    if has_entropy:
        sums.append(torch.special.entr(powers).sum(-1))  # 0, not NaN, where a logit is -inf
    total = torch.stack(sums)
    if _is_divided(group):
        dist.all_reduce(total, group=group)
    log_sum = total[0].log()
    is_known = total[2] > 0
    log_probs = torch.where(is_known, total[1] - log_sum, 0)
    entropy = log_sum + total[3] / total[0] if has_entropy else torch.zeros_like(log_sum)
    return log_probs, entropy, largest + log_sum, is_known


def _place(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """The place of each token in this rank's part of the vocabulary, 0 for others, and whether it has one."""
    place = tokens - size * (group.rank() if group is not None else 0)
    is_here = (place >= 0) & (place < size)
    return torch.where(is_here, place, 0), is_here


def _is_divided(group: Group) -> bool:
    return group is not None and group.size() > 1
