"""What one layer holds: its parameters, and the bytes that stay from the forward of a segment for its backward.

Activations follow arXiv 2205.05198, section 4 (34 bytes per token and hidden unit of a layer, and five per score where
scores are stored), in 16 bit; a recurrent layer keeps what the kernels of flash-linear-attention and mamba-ssm save.
"""

from .kernels import BYTES
from .model_shape import DeltaNet, Mamba, ModelShape
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


def layer_activation(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What the forward of one layer keeps for the backward of the segment [start, end), without what passes between
    segments."""
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    whole = rows * setup.model.hidden_size / setup.token_shares
    if setup.recompute == "full":
        return BYTES * whole
    # Of each block the input, the normalised input of its first product, and the mask of the dropout behind it.
    kept = sum(
        (5 if setup.software.dropout else 4) * whole + rows * block_bytes(setup, symbol) / setup.tensor_parallel
        for symbol in setup.model.blocks(layer)
    )
    if "*" in setup.model.blocks(layer) and not setup.software.fuses_kernels:
        kept += rows * 4 * BYTES * setup.model.head_dim  # cosines and sines for queries and for keys, on every rank
    if not setup.software.flash_attention and setup.recompute != "selective" and "*" in setup.model.blocks(layer):
        kept += 5 * rows * end * setup.model.num_heads / setup.tensor_parallel
    return kept


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


def layer_keys_values(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """Keys and values that the forward of the segment [start, end) makes, which are kept for its backward.

    The first segment of a micro-batch, which goes backward last, has the buffer for all of them; within a window each
    has its own, of which a window stays if they are computed again. Some software makes copies of the prefix instead.
    """
    if len(setup.segments) == 1:
        tokens = 0 if setup.recompute == "full" else end - start
    elif setup.software.concatenates_prefix:
        # Its own; and the copy for all, until the first segment goes backward.
        tokens = end - start + (0 if start else setup.sequence_length)
    elif _has_window(setup.model, layer):
        tokens = _seen_later(setup.model, layer, end - start) if setup.recompute == "full" else end - start
    else:
        tokens = setup.sequence_length if start == 0 else 0
    return BYTES * keys_values_of(setup, layer, tokens)


def layer_keys_values_gradients(setup: TrainingSetup, layer: int) -> float:
    """Gradients that later segments leave for the keys and values of earlier ones, in a buffer from the first backward
    of a micro-batch to its last."""
    if len(setup.segments) == 1:
        return 0.0
    # Some software adds those of the last segment to it.
    own = 0 if setup.software.concatenates_prefix else setup.segments[-1]
    tokens = _seen_later(setup.model, layer, setup.sequence_length - own)
    return (BYTES if setup.software.concatenates_prefix else 4) * keys_values_of(setup, layer, tokens)


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


def block_bytes(setup: TrainingSetup, symbol: str) -> float:
    """Bytes for each token inside a block, whose heads and columns tensor-parallel ranks share."""
    model = setup.model
    inner = (2 if model.is_gated else 1) + 1  # what goes into the activation function, and what comes out
    match symbol:
        case "*":
            # Queries and the output; the log-sum-exp of each head.
            statistics = 4 * model.num_heads if setup.software.flash_attention else 0
            return 2 * BYTES * model.num_heads * model.head_dim + statistics
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
