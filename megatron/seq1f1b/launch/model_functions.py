"""Functions for the models and losses of programs. Each imports Megatron only when it is called.

Tested in functional_tests/test_library.py by test_a_partitioned_state_trains_a_program_alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


def use_segment_attention(model: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Give the local self-attention layers of the model chunks our attention; one of Megatron's `pre_wrap_hooks`."""
    from ..model import use_segment_attention
    from .overlay import installed

    overlay = installed()
    return use_segment_attention(model) if overlay is None else overlay.use_segment_attention(model)


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, gathered: bool = False
) -> torch.Tensor:
    """The log-probabilities [b, s] of `tokens` [b, s] by logits [b, s, V/t] over a temperature, in fp32 or more, with a
    gradient. Logits of more than 2 GiB that a model returns under our schedules are never whole in it.

    The vocabulary is divided among Megatron's tensor-parallel ranks, unless the logits are `gathered`. A token outside
    of it, such as -100, gets 0. Raises ValueError for tokens of another shape.
    """
    from ..model import token_log_probs

    return token_log_probs(logits, tokens, temperature, gathered)


def token_log_probs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, gathered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `token_log_probs` returns, and the entropy [b, s] of the distribution at each place, in nats."""
    from ..model import token_log_probs_and_entropy

    return token_log_probs_and_entropy(logits, tokens, temperature, gathered)


def whole_weights(model: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
    """The weights of these model chunks whole, to read or write them between steps with `partition_state`; collective
    over the ranks of a pipeline stage."""
    from ..runtime.gradients.partitioned_state import whole

    return whole(model)


def local_hybrid_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's own layers for its hybrid model, which upstream builds with Transformer Engine only:
    `config.hybrid_stack_spec = local_hybrid_spec(config.transformer)`."""
    from ..platform.local_hybrid import local_hybrid_spec

    return local_hybrid_spec(config)
