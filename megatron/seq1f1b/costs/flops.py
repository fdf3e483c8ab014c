"""Floating-point operations of the parts of a GPT model; a multiply-add counts as two.

Only what grows with the model is counted: matrix products and attention. Norms, activations and the softmax are part
of the achieved throughput.
"""

from typing import NamedTuple

from .model_shape import LatentAttention, ModelShape


class Flops(NamedTuple):
    """Of one forward: `per_token` in matrix products, `per_pair` in attention for a query and a key that it sees."""

    per_token: int
    per_pair: int


def layer_flops(model: ModelShape, layer: int) -> Flops:
    """Of layer number `layer`, counted from 0."""
    projections, per_pair = _latent_attention(model, model.latent) if model.latent else _attention(model)
    return Flops(projections + _feed_forward(model, layer), per_pair)


def head_flops(model: ModelShape) -> int:
    """Of one token in the projection to the vocabulary."""
    return 2 * model.hidden_size * model.vocab_size


def authors_flops(model: ModelShape) -> Flops:
    """Of the whole model as the authors of Seq1F1B count (arXiv 2406.03488, section 3.4), for `uniform_comp`.

    With hidden size h, FFN size f, n heads of size d, padded vocabulary V and L layers: 4·h·V + L·(8·h·n·d + 4·h·f) per
    token, L·(4·d + 3)·n per pair; experts, gates and shared KV heads do not appear.
    """
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    return Flops(
        model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size,
        model.num_layers * (4 * model.head_dim + 3) * model.num_heads,
    )


def _attention(model: ModelShape) -> tuple[int, int]:
    width = model.num_heads * model.head_dim
    kv_width = (model.num_kv_heads or model.num_heads) * model.head_dim
    # Query and output, key and value.
    return 2 * model.hidden_size * (2 * width + 2 * kv_width), 4 * width


def _latent_attention(model: ModelShape, latent: LatentAttention) -> tuple[int, int]:
    hidden, heads = model.hidden_size, model.num_heads
    score_width = heads * (latent.head_dim + latent.rotary_head_dim)
    value_width = heads * latent.value_head_dim
    query = latent.query_rank * (hidden + score_width) if latent.query_rank else hidden * score_width
    down = hidden * (latent.kv_rank + latent.rotary_head_dim)
    up = latent.kv_rank * (heads * latent.head_dim + value_width)
    return 2 * (query + down + up + value_width * hidden), 2 * (score_width + value_width)


def _feed_forward(model: ModelShape, layer: int) -> int:
    per_width = 2 * model.hidden_size * (3 if model.is_gated else 2)
    if model.experts is None or layer not in model.expert_layers:
        return per_width * model.ffn_hidden_size
    experts = model.experts
    width = experts.active * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    return per_width * width + 2 * model.hidden_size * experts.total  # the last term is the router
