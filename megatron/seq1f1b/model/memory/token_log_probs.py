"""Log-probabilities of given tokens, and entropies, by pieces of logits: no more than a piece exists in 32 bits.

Tested in model/test_token_logits.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from .token_logits import PIECE, Group, Head, PieceLogits


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0, gathered: bool = False) -> Tensor:
    """The log-probabilities [b, s] of tokens [b, s], in fp32 or more, by logits [b, s, V/t] over a temperature.

    The vocabulary is divided among Megatron's tensor-parallel ranks, unless the logits are `gathered`. Tokens outside
    of it, such as -100, get 0. Raises ValueError for tokens of another shape.
    """
    return _log_probs_and_entropies(logits, tokens, temperature, gathered, has_entropy=False)[0]


def token_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, gathered: bool = False
) -> tuple[Tensor, Tensor]:
    """What `token_log_probs` returns, and the entropy [b, s] of each token's distribution in nats, in one pass."""
    log_probs, entropy = _log_probs_and_entropies(logits, tokens, temperature, gathered, has_entropy=True)
    return log_probs, entropy


def _log_probs_and_entropies(
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
            source = _LogitsOfHidden(logits.head, logits.dtype)
            return _LogProbsAndEntropies.apply(logits.hidden, tokens, source, group, 1 / temperature, has_entropy)
    else:
        is_divided = parallel_state.model_parallel_is_initialized() and not gathered
        group = parallel_state.get_tensor_model_parallel_group() if is_divided else None
    length = max(1, PIECE // logits.shape[-1])
    return _LogProbsAndEntropies.apply(logits, tokens, _GivenLogits(length), group, 1 / temperature, has_entropy)


class _Source(Protocol):
    """Where the logits of a piece come from. Its rows [n, features] are logits by themselves, or hidden states."""

    length: int  # rows of a piece

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [n, V/t] of rows, without a graph."""

    def backward(self, pieces: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The gradient of the rows of all pieces; `gradient_of(index, piece)` is that of the logits of one."""


class _GivenLogits(_Source):
    """Logits that have been computed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def logits(self, rows: Tensor) -> Tensor:
        return rows

    def backward(self, pieces: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        gradient = pieces[0].new_empty((sum(map(len, pieces)), pieces[0].shape[1]))
        for index, (piece, of_piece) in enumerate(zip(pieces, gradient.split(self.length), strict=True)):
            of_piece.copy_(gradient_of(index, piece))
        return gradient


class _LogitsOfHidden(_Source):
    """Logits of a type that the output layer computes from hidden states."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.length = max(1, head.piece // head.weight.shape[0])
        self._head = head
        self._dtype = dtype

    def logits(self, rows: Tensor) -> Tensor:
        return self._head.logits(rows).to(self._dtype)

    def backward(self, pieces: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        return self._head.backward(pieces, gradient_of)


class _LogProbsAndEntropies(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies, by pieces of logits `z = source.logits(rows)`, for rows
    [..., features].

    With p = exp(z - log_sum), the gradient of a log-probability is 1 - p at the token and -p elsewhere, and that of the
    entropy H is -p·(log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, tokens: Tensor, source: _Source, group: Group, scale: float, has_entropy: bool
    ) -> tuple[Tensor, ...]:
        rows = tensor.detach().flatten(0, -2)
        flat = tokens.flatten()
        of_pieces = []
        for piece, tokens_of_piece in zip(rows.split(source.length), flat.split(source.length), strict=True):
            logits = _scaled(source.logits(piece), scale)
            of_pieces.append(_token_values(logits, tokens_of_piece, group, has_entropy))
        values = _TokenValues(*map(torch.cat, zip(*of_pieces, strict=True)))
        ctx.source = source
        ctx.group = group
        ctx.scale = scale
        ctx.has_entropy = has_entropy
        ctx.save_for_backward(tensor, flat, values.log_sum, values.entropy, values.is_known)
        log_probs = values.log_prob.view(tokens.shape)
        return (log_probs, values.entropy.view(tokens.shape)) if has_entropy else (log_probs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensor, *of_tokens = ctx.saved_tensors
        source: _Source = ctx.source
        scale = ctx.scale
        rows = tensor.detach().flatten(0, -2)
        tokens, log_sums, entropies, are_known = (values.split(source.length) for values in of_tokens)
        of_log_probs, *of_entropies = (gradient.flatten().split(source.length) for gradient in gradients)

        def gradient_of(index: int, piece: Tensor) -> Tensor:
            """The gradient of the logits [n, V/t] of a piece, by the formulas above, in which the token counts once."""
            logits = _scaled(source.logits(piece), scale)
            place, is_here = _place(tokens[index], logits.shape[-1], ctx.group)
            probs = (logits - log_sums[index][:, None]).exp_()
            of_log_prob = of_log_probs[index] * are_known[index]
            gradient = probs * -of_log_prob[:, None]
            gradient.scatter_add_(-1, place[:, None], (of_log_prob * is_here)[:, None])
            if ctx.has_entropy:
                (of_entropy,) = of_entropies
                per_logit = torch.special.entr(probs) - probs * entropies[index][:, None]  # -p·(log p + H)
                gradient += per_logit * of_entropy[index][:, None]
            return gradient if scale == 1.0 else gradient.mul_(scale)

        gradient_of_rows = source.backward(rows.split(source.length), gradient_of)
        return gradient_of_rows.view(tensor.shape), None, None, None, None, None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits * scale


class _TokenValues(NamedTuple):
    """Values [n] of n tokens, whose logits are z."""

    log_prob: Tensor
    entropy: Tensor  # zeros unless asked for
    log_sum: Tensor  # log Σ exp(z)
    is_known: Tensor  # whether the vocabulary has the token


def _token_values(logits: Tensor, tokens: Tensor, group: Group, has_entropy: bool) -> _TokenValues:
    """The values of tokens [n] by logits [n, V/t]."""
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
    return _TokenValues(log_probs, entropy, largest + log_sum, is_known)


def _place(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """The place of each token in this rank's part of the vocabulary, 0 for others, and whether it has one."""
    place = tokens - size * (group.rank() if group is not None else 0)
    is_here = (place >= 0) & (place < size)
    return torch.where(is_here, place, 0), is_here


def _is_divided(group: Group) -> bool:
    return group is not None and group.size() > 1
