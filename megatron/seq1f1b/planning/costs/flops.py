"""Floating-point operations of the parts of a model; a multiply-add counts as two."""

from .blocks import blocks_of, layer_kinds
from .model_shape import ModelShape


def layer_flops(model: ModelShape, layer: int) -> tuple[float, float]:
    """Of the forward of a layer: FLOPs of a token in matrix products and recurrences, and in attention those of a query
    and a key that it sees. Raises ValueError for a layer whose cost is not known."""
    per_token = per_pair = 0.0
    for block in blocks_of(model, layer):
        routed = block.active * sum(product.size for product in block.expert)
        router = model.hidden_size * block.experts
        per_token += 2 * (sum(product.size for product in block.products) + routed + router) + block.scan
        if block.attention:
            per_pair += 2 * block.attention.heads * (block.attention.score_dim + block.attention.value_dim)
    return per_token, per_pair


def head_flops(model: ModelShape) -> int:
    """FLOPs of one token in the projections to the vocabulary; a prediction head also joins hidden states and
    embeddings by a projection (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    depth = model.prediction_depth
    return 2 * (1 + depth) * model.hidden_size * model.vocab_size + 4 * depth * model.hidden_size**2


def authors_flops(model: ModelShape) -> tuple[int, int]:
    """FLOPs of the whole model, per token and per pair of a query and a key that it sees, as the authors of Seq1F1B
    count (arXiv 2406.03488, section 3.4), for `uniform_comp`.

    With hidden size h, FFN size f, n heads of size d, padded vocabulary V and L layers: 4·h·V + L·(8·h·n·d + 4·h·f) per
    token, L·(4·d + 3)·n per pair; experts, gates and shared KV heads do not appear.
    """
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    per_token = model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size
    return per_token, model.num_layers * (4 * model.head_dim + 3) * model.num_heads


def model_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences, forward and backward: what the layers compute, attention causal, nothing
    recomputed."""
    layers = [*range(model.num_layers), *[model.num_layers - 1] * model.prediction_depth]
    total = float(head_flops(model) * sequence_length)
    for layer, count in layer_kinds(model, layers):
        per_token, per_pair = layer_flops(model, layer)
        total += count * (per_token * sequence_length + per_pair * pairs(0, sequence_length, model.window_of(layer)))
    return 3.0 * batch * total


def pairs(start: int, end: int, window: int | None) -> float:
    """Keys that the tokens [start, end) see: their own, and of those before it at most `window`."""
    if window is None or window >= end:
        return (end - start) * (start + end + 1) / 2
    # Up to token number `window` the window reaches back to the start of the sequence.
    growing = max(0, window - start)
    return growing * (2 * start + growing + 1) / 2 + (end - start - growing) * (window + 1)
