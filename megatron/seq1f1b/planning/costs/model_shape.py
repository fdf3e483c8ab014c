"""The sizes of a model that decide what a segment costs."""

from dataclasses import dataclass, fields
from functools import cached_property


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward block of a layer.

    Every token goes through `active` of `total` experts of `ffn_hidden_size`, and through the shared experts, which
    together have `shared_ffn_hidden_size` (0: none).
    """

    total: int
    active: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention: queries, keys and values expanded from low-rank projections.

    `query_rank` is 0 where queries are projected directly. Scores take heads of `head_dim` + `rotary_head_dim`, values
    of `value_head_dim`.
    """

    query_rank: int
    kv_rank: int
    head_dim: int
    rotary_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: queries and keys in `key_heads` of `key_head_dim`, values and states in `value_heads` of
    `value_head_dim`; a convolution over `convolution` tokens before them."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolution: int = 4

    def shared_by(self, tensor: int, context: int) -> bool:
        return all(heads % (tensor * context) == 0 for heads in (self.key_heads, self.value_heads))


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer: `heads` of `head_dim`, each with a state of `state_dim` columns; input and output projections of
    the states are shared by the heads of one of `groups`; a convolution over `convolution` tokens before them."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    convolution: int = 4

    def shared_by(self, tensor: int, context: int) -> bool:
        """Context-parallel ranks share a group, or have several."""
        groups, rest = divmod(self.groups, tensor)
        return not rest and self.heads % (tensor * context) == 0 and 0 in (groups % context, context % groups)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the whole model, before it is cut over ranks; layers are numbered from 0."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int  # padded
    num_kv_heads: int | None = None  # None without grouped-query attention
    is_gated: bool = False  # the feed-forward block has three matrices (SwiGLU) instead of two (GELU)
    latent: LatentAttention | None = None
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()  # those with `experts`
    window: int | None = None  # so many keys before its own a query sees at most, in `window_layers`
    window_layers: tuple[int, ...] = ()
    # A symbol a layer of a hybrid model, as Megatron names them: * attention, + latent attention, - feed-forward,
    # E experts, G gated delta net, M Mamba-2.
    pattern: str | None = None
    delta_net: DeltaNet | None = None
    mamba: Mamba | None = None
    prediction_depth: int = 0  # more layers, each with a projection to the vocabulary, that predict later tokens
    has_biases: bool = False  # so do products; costs leave biases out
    learned_positions: int = 0  # these have an embedding each; 0: positions are rotary
    has_qk_norms: bool = False  # each head of queries and of keys has a norm

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # models are keys of all caches
        return hash(tuple(vars(self)[each.name] for each in fields(self)))

    def blocks(self, layer: int) -> str:
        """What layer number `layer`, counted from 0, is made of, as Megatron names the layers of hybrid models."""
        if self.pattern is not None:
            return self.pattern[layer]
        attention = "*" if self.latent is None else "+"
        return attention + ("E" if self.experts is not None and layer in self.expert_layers else "-")

    @property
    def may_hide_experts(self) -> bool:
        """Whether Megatron can exchange tokens of experts beside the compute of another micro-batch: not in hybrid
        models, nor with several prediction heads."""
        return self.pattern is None and self.prediction_depth <= 1

    def shares_recurrent_heads(self, tensor: int, context: int) -> bool:
        """Whether so many tensor- and context-parallel ranks can have equal parts of the heads of recurrent layers."""
        return all(kind is None or kind.shared_by(tensor, context) for kind in (self.delta_net, self.mamba))

    def window_of(self, layer: int) -> int | None:
        """How many keys before its own a query of this layer sees at most; None where it sees all."""
        return self.window if layer in self.window_layers else None

    def keys_given(self, layer: int, start: int, end: int) -> int:
        """How many keys attention of the tokens [start, end) is given in this layer: theirs, and those before them."""
        window = self.window_of(layer)
        return end if window is None else min(end, end - start + window)
