"""What one layer holds in memory: what its forward keeps for its backward, and what an action holds. Bytes.

Activations follow arXiv 2205.05198, section 4 (34 bytes per token and hidden unit of a layer, and five per score where
scores are stored), in 16 bit; a recurrent layer keeps what the kernels of flash-linear-attention and mamba-ssm save.

The backward of a layer holds the gradients of what one of its blocks kept, each until the next is made; around its
products the whole input and its gradient, of which tensor-parallel ranks otherwise have a part each (section 4.2.2);
and the gradient of the residual stream. The loss holds logits in several precisions.
"""

from dataclasses import replace
from functools import singledispatch

from .model_shape import DeltaNet, Mamba, ModelShape
from .operations import BYTES
from .training_setup import TrainingSetup

# Tokens that the kernel of gated delta nets solves a triangular system for.
_DELTA_NET_CHUNK = 64
# The blocks whose sizes are known.
_KNOWN = frozenset("*-EGM")


def are_known(model: ModelShape) -> bool:
    """Whether the sizes of all layers are: not those of latent attention."""
    return model.latent is None and all(_KNOWN.issuperset(model.blocks(layer)) for layer in range(model.num_layers))


def layers_alike(setup: TrainingSetup, stage: int) -> list[tuple[int, int]]:
    """The kinds of layers of a stage: the number of one of them in the model, and how many there are."""
    found: dict[tuple[str, bool], tuple[int, int]] = {}
    for layer in setup.layers_of(stage):
        kind = setup.model.blocks(layer), _has_window(setup.model, layer)
        one, count = found.get(kind, (layer, 0))
        found[kind] = one, count + 1
    return list(found.values())


@singledispatch
def layer_activation(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What the forward of one layer keeps for the backward of the segment [start, end), without what passes between
    segments."""
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    whole = rows * setup.model.hidden_size / setup.token_shares
    if setup.recompute == "full":
        return BYTES * whole
    # Of each block the input, and the normalised input of its first product.
    return sum(
        2 * BYTES * whole + rows * block_bytes(setup.model, symbol) / setup.tensor_parallel
        for symbol in setup.model.blocks(layer)
    )


def layer_kept_for_weights(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What stays from the input gradients of a segment on for its weight gradients: inputs of products and gradients of
    their outputs (arXiv 2401.10241, table 1: 32 bytes per token and hidden unit).

    With sequence parallelism the gradient of what a block returns is that of all tokens, on every rank.
    """
    model = setup.model
    if any(symbol not in "*-" for symbol in model.blocks(layer)):
        return layer_activation(setup, layer, start, end)
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    ends = model.hidden_size / setup.token_shares + model.hidden_size
    width, kv_width = model.num_heads * model.head_dim, (model.num_kv_heads or model.num_heads) * model.head_dim
    inside = {"*": 2 * width + 2 * kv_width, "-": (3 if model.is_gated else 2) * model.ffn_hidden_size}
    return sum(BYTES * rows * (ends + inside[symbol] / setup.tensor_parallel) for symbol in model.blocks(layer))


@singledispatch
def layer_keys_values(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """Keys and values that the forward of the segment [start, end) makes, which are kept for its backward.

    The first segment of a micro-batch, which goes backward last, has the buffer for all of them; within a window each
    has its own, of which a window stays if they are computed again.
    """
    if len(setup.segments) == 1:
        tokens = 0 if setup.recompute == "full" else end - start
    elif _has_window(setup.model, layer):
        tokens = _seen_later(setup.model, layer, end - start) if setup.recompute == "full" else end - start
    else:
        tokens = setup.sequence_length if start == 0 else 0
    return BYTES * keys_values_of(setup, layer, tokens)


@singledispatch
def layer_keys_values_gradients(setup: TrainingSetup, layer: int) -> float:
    """Gradients that later segments leave for the keys and values of earlier ones, in a buffer from the first backward
    of a micro-batch to its last."""
    if len(setup.segments) == 1:
        return 0.0
    tokens = _seen_later(setup.model, layer, setup.sequence_length - setup.segments[-1])
    return 4 * keys_values_of(setup, layer, tokens)


def layer_state(setup: TrainingSetup, layer: int) -> float:
    """The state that a recurrent layer passes from one segment to the next: a matrix for each head in 32 bit, and the
    last columns before the convolution."""
    model, blocks = setup.model, setup.model.blocks(layer)
    if "G" in blocks and model.delta_net is not None:
        net = model.delta_net
        state = 4 * net.value_heads * net.key_head_dim * net.value_head_dim
        columns = BYTES * (net.convolution - 1) * _convolved(net)
    elif "M" in blocks and model.mamba is not None:
        mamba = model.mamba
        state = 4 * mamba.heads * mamba.head_dim * mamba.state_dim
        columns = BYTES * (mamba.convolution - 1) * _convolved(mamba)
    else:
        return 0.0
    return setup.micro_batch_size * (state + columns) / (setup.tensor_parallel * setup.context_parallel)


def _seen_later(model: ModelShape, layer: int, tokens: int) -> int:
    """How many of a number of tokens those after them see."""
    return tokens if model.window is None or not _has_window(model, layer) else min(tokens, model.window)


def _has_window(model: ModelShape, layer: int) -> bool:
    return model.window is not None and layer in model.window_layers


def keys_values_of(setup: TrainingSetup, layer: int, tokens: int) -> float:
    """Numbers in the keys and values of so many tokens of every sequence."""
    model = setup.model
    if "*" not in model.blocks(layer):
        return 0.0
    heads = (model.num_kv_heads or model.num_heads) / setup.tensor_parallel
    # Context-parallel ranks share heads; more ranks than KV heads have one each.
    shares = min(setup.context_parallel, max(1, heads))
    return 2 * heads * model.head_dim * setup.micro_batch_size * tokens / shares


def block_bytes(model: ModelShape, symbol: str) -> float:
    """Bytes for each token inside a block, whose heads and columns tensor-parallel ranks share."""
    inner = (2 if model.is_gated else 1) + 1  # what goes into the activation function, and what comes out
    match symbol:
        case "*":
            # Queries and the output; the log-sum-exp of each head.
            return 2 * BYTES * model.num_heads * model.head_dim + 4 * model.num_heads
        case "-":
            return BYTES * inner * model.ffn_hidden_size
        case "E" if model.experts is not None:
            experts = model.experts
            # What is sent to the experts, what they compute from it, and what they return.
            of_expert = 2 * model.hidden_size + inner * experts.ffn_hidden_size
            return BYTES * (inner * experts.shared_ffn_hidden_size + experts.active * of_expert)
        case "G" if model.delta_net is not None:
            net = model.delta_net
            expanded = 2 * net.value_heads * net.key_head_dim  # queries and keys, for each head of the values
            width = net.value_heads * net.value_head_dim
            # Values; the output before and after the norm, and its gate; what solves a chunk; decay and strength.
            kept = 2 * _convolved(net) + expanded + 4 * width + net.value_heads * _DELTA_NET_CHUNK
            return BYTES * kept + 8 * net.value_heads
        case "M" if model.mamba is not None:
            mamba = model.mamba
            # The output before and after the norm, and its gate; the steps.
            return BYTES * (2 * _convolved(mamba) + 3 * mamba.heads * mamba.head_dim) + 8 * mamba.heads
    raise AssertionError(f"ask are_known before the size of a layer {symbol}")


def _convolved(layer: DeltaNet | Mamba) -> int:
    """Columns that go through the convolution."""
    if isinstance(layer, DeltaNet):
        return 2 * layer.key_heads * layer.key_head_dim + layer.value_heads * layer.value_head_dim
    return layer.heads * layer.head_dim + 2 * layer.groups * layer.state_dim


# Bytes of a logit: in 16 bit, and its exponential in 32 bit, which is computed in place. The exponential is kept for
# the backward, which makes a gradient in 16 bit of it for the weight gradients.
_LOGIT, LOGIT_KEPT, LOGIT_KEPT_FOR_WEIGHTS = 6, 4, BYTES


def logits(setup: TrainingSetup, length: int) -> float:
    """How many a segment of `length` tokens has on a rank."""
    return setup.micro_batch_size * length / setup.context_parallel * setup.model.vocab_size / setup.tensor_parallel


@singledispatch
def loss_bytes(setup: TrainingSetup, length: int, is_forward: bool = True) -> float:
    """Logits, and what the loss makes of them, at their most."""
    return _LOGIT * logits(setup, length)


def whole_input(setup: TrainingSetup, length: int) -> float:
    """The residual stream of all tokens of a segment, which every tensor-parallel rank has around a product."""
    return BYTES * setup.micro_batch_size * length / setup.context_parallel * setup.model.hidden_size


@singledispatch
def backward_working(setup: TrainingSetup, stage: int, start: int, end: int) -> float:
    """The most of any layer of a stage in the backward of the segment [start, end)."""
    return max((_layer(setup, layer, start, end) for layer, _ in layers_alike(setup, stage)), default=0.0)


def _layer(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    length = end - start
    whole = whole_input(setup, length)
    residual = whole / setup.token_shares
    around = residual + whole + (whole if setup.token_shares > 1 else 0.0)
    again = layer_activation(replace(setup, recompute="none"), layer, start, end) if setup.recompute == "full" else 0.0
    return around + again + max(block_working(setup, layer, symbol, start, end) for symbol in setup.model.blocks(layer))


@singledispatch
def block_working(setup: TrainingSetup, layer: int, symbol: str, start: int, end: int) -> float:
    """What the backward of one block of a layer holds for the segment [start, end)."""
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    kept = rows * block_bytes(setup.model, symbol) / setup.tensor_parallel
    if symbol != "*":
        return kept
    # The kernel returns gradients of all keys and values that it was given, and sums those of the queries in 32 bit.
    of_queries = 4 * rows * setup.model.num_heads * setup.model.head_dim / setup.tensor_parallel
    return kept + BYTES * keys_values_of(setup, layer, end) + of_queries
