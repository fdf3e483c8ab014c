"""Floating-point operations of the parts of a GPT model; a multiply-add counts as two.

Only what grows with the model is counted: matrix products and attention. Norms, activations and the softmax are part
of the achieved throughput.
"""

from typing import NamedTuple

from ...errors import ParameterError
from .model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape

# Tokens that the kernels of recurrent layers compute at once.
_DELTA_NET_CHUNK, _MAMBA_CHUNK = 64, 128


class Flops(NamedTuple):
    """FLOPs of one forward: `per_token` in matrix products, `per_pair` in attention for a query and a key that it
    sees."""

    per_token: int
    per_pair: int


def layer_flops(model: ModelShape, layer: int) -> Flops:
    """FLOPs of layer number `layer`, counted from 0."""
    if model.pattern is not None:
        return _hybrid_layer(model, model.pattern[layer])
    projections, per_pair = _latent_attention(model, model.latent) if model.latent else _attention(model)
    if model.experts is not None and layer in model.expert_layers:
        return Flops(projections + _experts(model, model.experts), per_pair)
    return Flops(projections + _feed_forward(model), per_pair)


def head_flops(model: ModelShape) -> int:
    """FLOPs of one token in the projection to the vocabulary."""
    return 2 * model.hidden_size * model.vocab_size


def joining_flops(model: ModelShape) -> int:
    """Of one token in the projection by which a layer that predicts one token more joins hidden states and embeddings
    (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    return 4 * model.hidden_size**2


def authors_flops(model: ModelShape) -> Flops:
    """FLOPs of the whole model as the authors of Seq1F1B count (arXiv 2406.03488, section 3.4), for `uniform_comp`.

    With hidden size h, FFN size f, n heads of size d, padded vocabulary V and L layers: 4·h·V + L·(8·h·n·d + 4·h·f) per
    token, L·(4·d + 3)·n per pair; experts, gates and shared KV heads do not appear.
    """
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    return Flops(
        model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size,
        model.num_layers * (4 * model.head_dim + 3) * model.num_heads,
    )


def model_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences, forward and backward: what the layers compute, attention causal, nothing
    recomputed."""
    layers = [layer_flops(model, layer) for layer in range(model.num_layers)]
    per_token = head_flops(model) + sum(layer.per_token for layer in layers)
    per_pair = sum(layer.per_pair for layer in layers)
    return 3.0 * batch * sequence_length * (per_token + per_pair * (sequence_length + 1) / 2)


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


def _hybrid_layer(model: ModelShape, symbol: str) -> Flops:
    match symbol:
        case "*":
            return Flops(*_attention(model))
        case "+" if model.latent is not None:
            return Flops(*_latent_attention(model, model.latent))
        case "-":
            return Flops(_feed_forward(model), 0)
        case "E" if model.experts is not None:
            return Flops(_experts(model, model.experts), 0)
        case "G" if model.delta_net is not None:
            return Flops(_delta_net(model.hidden_size, model.delta_net), 0)
        case "M" if model.mamba is not None:
            return Flops(_mamba(model.hidden_size, model.mamba), 0)
    raise ParameterError("{pattern.name} has a layer {0} whose cost is not known; use {strategy:even}", symbol)


def _delta_net(hidden: int, layer: DeltaNet) -> int:
    """The chunked gated delta rule (arXiv 2412.06464, section 3.3)."""
    heads, key, value = layer.value_heads, layer.key_head_dim, layer.value_head_dim
    key_width, value_width = layer.key_heads * key, heads * value
    projections = hidden * (2 * key_width + 2 * value_width + 2 * heads) + value_width * hidden
    # The state is read by keys and by queries, and written; in a chunk a token meets half of the others: two scores,
    # the triangular system for keys and values, and the output.
    state = 3 * heads * key * value
    chunk = heads * _DELTA_NET_CHUNK * (3 * key + 2 * value) // 2
    return 2 * (projections + state + chunk)


def _mamba(hidden: int, layer: Mamba) -> int:
    """The chunked scan (arXiv 2405.21060, section 6)."""
    width, states = layer.heads * layer.head_dim, layer.groups * layer.state_dim
    projections = hidden * (2 * width + 2 * states + layer.heads) + width * hidden
    # The state is written and read; in a chunk a token meets half of the others: one score and the output.
    state = 2 * width * layer.state_dim
    chunk = _MAMBA_CHUNK * (layer.groups * layer.state_dim + width) // 2
    return 2 * (projections + state + chunk)


def _feed_forward(model: ModelShape) -> int:
    return _per_width(model) * model.ffn_hidden_size


def _experts(model: ModelShape, experts: Experts) -> int:
    width = experts.active * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    return _per_width(model) * width + 2 * model.hidden_size * experts.total  # the last term is the router


def _per_width(model: ModelShape) -> int:
    return 2 * model.hidden_size * (3 if model.is_gated else 2)
