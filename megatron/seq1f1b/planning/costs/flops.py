"""Floating-point operations of the parts of a model; a multiply-add counts as two.

Only what grows with the model is counted: norms, activations and the softmax are part of the achieved throughput.
"""

from .blocks import blocks_of, layer_kinds
from .model_shape import ModelShape


def layer_flops(model: ModelShape, layer: int) -> tuple[float, float]:
    """FLOPs of the forward of a layer: of a token in products and recurrences, and of a query and a key that it sees in
    attention. Raises ValueError for an unknown layer."""
    per_token = per_pair = 0.0
    for block in blocks_of(model, layer):
        routed = block.active * sum(product.size for product in block.expert)
        router = model.hidden_size * block.experts
        per_token += 2 * (sum(product.size for product in block.products) + routed + router) + block.scan
        if block.attention:
            per_pair += 2 * block.attention.heads * (block.attention.score_dim + block.attention.value_dim)
    return per_token, per_pair


def head_flops(model: ModelShape) -> int:
    """FLOPs of a token in the projections to the vocabulary, and in those by which prediction heads join hidden states
    and embeddings (arXiv 2412.19437, section 2.2)."""
    depth = model.prediction_depth
    return 2 * (1 + depth) * model.hidden_size * model.vocab_size + 4 * depth * model.hidden_size**2


def authors_flops(model: ModelShape) -> tuple[int, int]:
    """FLOPs of the whole model, per token and per pair of a query and a key, as the authors of Seq1F1B count them for
    `uniform_comp` (arXiv 2406.03488, section 3.4), without experts, gates and shared KV heads."""
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    per_token = model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size
    return per_token, model.num_layers * (4 * model.head_dim + 3) * model.num_heads


def model_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences, forward and backward, without what is computed again."""
    layers = [*range(model.num_layers), *[model.num_layers - 1] * model.prediction_depth]
    total = float(head_flops(model) * sequence_length)
    for layer, count in layer_kinds(model, layers):
        per_token, per_pair = layer_flops(model, layer)
        total += count * (per_token * sequence_length + per_pair * pairs(0, sequence_length, model.window_of(layer)))
    return 3.0 * batch * total


def pairs(start: int, end: int, window: int | None) -> float:
    """The number of keys that all tokens [start, end) see: each its own, and at most `window` before it."""
    if window is None or window >= end:
        return (end - start) * (start + end + 1) / 2
    growing = max(0, window - start)  # tokens that still see the start of the sequence
    return growing * (2 * start + growing + 1) / 2 + (end - start - growing) * (window + 1)
