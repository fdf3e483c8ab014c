"""The sizes of a GPT model that decide what a segment costs."""

from dataclasses import dataclass


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
class ModelShape:
    """Sizes of the whole model, before it is cut over ranks.

    `head_dim` is the size of one attention head; `vocab_size` is the padded vocabulary. `num_kv_heads` is None without
    grouped-query attention. `is_gated` tells a feed-forward block of three matrices (SwiGLU) from one of two (GELU).
    `expert_layers` numbers, from 0, the layers that hold `experts`.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    num_kv_heads: int | None = None
    is_gated: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()
