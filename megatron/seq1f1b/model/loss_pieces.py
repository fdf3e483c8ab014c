"""The loss of a segment without its logits: computed in pieces of tokens, and again in the backward.

The last stage runs all forwards of a micro-batch before its first backward. Logits take 4·s·b·V/t bytes there, whatever
the number of segments: 64 GiB for a million tokens, a vocabulary of 128k and 8 tensor-parallel ranks. Instead the stage
keeps hidden states, 2·s·b·h/t bytes with sequence parallelism, and the backward repeats a product of 2·s·b·h·V/t FLOPs.

Megatron's own output layer and cross entropy compute each piece, so all their features stay. The weight gradient of a
piece is computed with its input gradient, in I if backwards are split: in W it would need the logits once more.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..patches import patched_on, wrapping

PIECE = 2**26  # logits: 256 MiB in fp32, and enough rows for a product at full speed
WORTH = 8  # pieces, 2 GiB; fewer are kept, since the repeated product can take a tenth of a small model's last stage


def compute_loss_in_pieces(chunks: Iterable[torch.nn.Module], num_tokens: int, piece: int | None = PIECE) -> None:
    """Make model chunks with an output layer compute their losses in pieces of `piece` logits; None keeps all logits.

    `num_tokens` are those of a micro-batch on this context-parallel rank, s·b. Up to `WORTH` pieces of logits are kept
    in any case. The latest call wins.
    """
    for model in map(unwrap_model, chunks):
        layer = getattr(model, "output_layer", None)
        if not (isinstance(model, LanguageModule) and isinstance(layer, ColumnParallelLinear)) or layer.gather_output:
            continue
        if not hasattr(layer, "logits_of_piece"):
            patched_on([layer], [wrapping("torch.nn.Module.forward", _logits, "computes all logits at once")])
            patched_on([model], [wrapping(_LOSS, _loss, "keeps all logits for the backward")])
        heads = 1 + (model.config.mtp_num_layers or 0)
        is_worth_it = piece is not None and heads * num_tokens * layer.output_size_per_partition > WORTH * piece
        layer.logits_of_piece = piece if is_worth_it else None
        if is_worth_it:
            # Fused accumulation marks the weight as done, and autograd gives a repeated forward a copy without marks.
            layer.gradient_accumulation_fusion = False


def keeps_logits(layer: torch.nn.Module) -> bool:
    """False for an output layer that computes its logits in pieces."""
    return getattr(layer, "logits_of_piece", None) is None


class Logits:
    """Logits [n, b, V/t] that are computed when needed: in pieces for the loss and the largest of each token, else
    whole.

    `of(hidden)` computes the logits of hidden states [n/t, b, h], a run of the tokens on each of `num_runs` ranks. A
    piece has `length` tokens of each run.
    """

    def __init__(self, of: Callable[[Tensor], Tensor], hidden: Tensor, layer: ColumnParallelLinear) -> None:
        self.of = of
        self.hidden = hidden
        self.num_runs = layer.tp_group.size() if layer.sequence_parallel else 1
        self.shape = torch.Size((self.num_runs * len(hidden), hidden.shape[1], layer.output_size_per_partition))
        self.length = max(1, layer.logits_of_piece // (self.num_runs * self.shape[1:].numel()))
        self._layer = layer

    def loss(self, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`loss(labels, logits)` [b, n] for labels [b, n]; its backward computes the logits again."""
        of = self.of  # `self` would keep the hidden states from moving to the host

        def of_piece(hidden: Tensor, labels: Tensor) -> Tensor:
            return loss(labels, of(hidden))

        parts = labels.unflatten(1, (self.num_runs, -1)).split(self.length, dim=2)
        pieces = zip(self.hidden.split(self.length), parts, strict=True)
        losses = [
            checkpoint(of_piece, hidden, part.flatten(1), use_reentrant=False, preserve_rng_state=False)
            for hidden, part in pieces
        ]
        return self._joined(losses, dim=1)

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """The largest logit of each token and its index [n, b], from which Megatron counts correct predictions."""
        found = [self.of(hidden).max(dim=dim) for hidden in self.hidden.split(self.length)]
        values, indices = (self._joined(each, dim=0) for each in zip(*found, strict=True))
        return values, indices

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __mul__(self, factor: Any) -> "Logits":
        """The maximal update parametrization scales logits (arXiv 2203.03466)."""
        of = self.of
        return Logits(lambda hidden: of(hidden) * factor, self.hidden, self._layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of(self.hidden), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.argmax:
            return args[0].max(**kwargs)[1]
        return func(*(each.of(each.hidden) if isinstance(each, Logits) else each for each in args), **(kwargs or {}))

    def _joined(self, pieces: Iterable[Tensor], dim: int) -> Tensor:
        """Pieces joined along the tokens in `dim`, in the order of the sequence."""
        return torch.cat([each.unflatten(dim, (self.num_runs, -1)) for each in pieces], dim + 1).flatten(dim, dim + 1)


_LOSS = "megatron.core.models.common.language_module.language_module.LanguageModule.compute_language_model_loss"


def _logits(layer: ColumnParallelLinear, forward: Callable, hidden: Tensor, *args: Any, **options: Any) -> tuple:
    if keeps_logits(layer) or options.get("runtime_gather_output"):
        return forward(hidden, *args, **options)
    return Logits(lambda part: forward(part, *args, **options)[0], hidden, layer), None


def _loss(model: LanguageModule, loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor, logits: Any) -> Tensor:
    return logits.loss(labels, loss) if isinstance(logits, Logits) else loss(labels, logits)
