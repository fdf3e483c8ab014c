"""What an action holds while it runs, beside what forwards leave for backwards. Bytes.

The backward of a layer holds the gradients of what one of its blocks kept, each until the next is made; around its
products the whole input and its gradient, of which tensor-parallel ranks otherwise have a part each (arXiv 2205.05198,
section 4.2.2); and the gradient of the residual stream. The loss holds logits in several precisions.
"""

from dataclasses import replace

from .kernels import BYTES
from .layer_sizes import block_bytes, keys_values_of, layer_activation, layers_alike
from .training_setup import TrainingSetup

# Tensors of the size of its input that the backward of GELU has at once where every operation is a kernel of its own:
# the input with its bias, the hyperbolic tangent, its derivative, two factors, what comes in and what goes out.
_UNFUSED_ACTIVATION = 7
# Bytes of a logit: in 16 bit, in 32 bit, and its exponential, which takes the place of the second where it is computed
# in place. The exponential is kept for the backward, which makes a gradient in 16 bit of it for the weight gradients.
_LOGIT_IN_PLACE, _LOGIT_COPIED, LOGIT_KEPT, LOGIT_KEPT_FOR_WEIGHTS = 6, 10, 4, BYTES


def logits(setup: TrainingSetup, length: int) -> float:
    """How many a segment of `length` tokens has on a rank."""
    return setup.micro_batch_size * length / setup.context_parallel * setup.model.vocab_size / setup.tensor_parallel


def loss_bytes(setup: TrainingSetup, length: int, is_forward: bool = True) -> float:
    """Logits, and what the loss makes of them, at their most."""
    in_place = setup.software.fuses_kernels or not is_forward
    return (_LOGIT_IN_PLACE if in_place else _LOGIT_COPIED) * logits(setup, length)


def whole_input(setup: TrainingSetup, length: int) -> float:
    """The residual stream of all tokens of a segment, which every tensor-parallel rank has around a product."""
    return BYTES * setup.micro_batch_size * length / setup.context_parallel * setup.model.hidden_size


def backward_working(setup: TrainingSetup, stage: int, start: int, end: int) -> float:
    """The most of any layer of a stage in the backward of the segment [start, end)."""
    layers = setup.layers_of(stage)
    most = max((_layer(setup, layer, start, end) for layer, _ in layers_alike(setup, stage)), default=0.0)
    if setup.software.frees_late and setup.token_shares > 1:
        # Of each layer stay two gathered gradients of outputs and two gradients of gathered inputs, while what the
        # layer kept is freed.
        stays = 4 * whole_input(setup, end - start) - layer_activation(setup, layers[0], start, end)
        most += len(layers) * max(0.0, stays)
    return most


def _layer(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    length = end - start
    whole = whole_input(setup, length)
    residual = whole / setup.token_shares
    around = residual + whole + (whole if setup.token_shares > 1 else 0.0)
    again = layer_activation(replace(setup, recompute="none"), layer, start, end) if setup.recompute == "full" else 0.0
    return around + again + max(_block(setup, layer, symbol, start, end) for symbol in setup.model.blocks(layer))


def _block(setup: TrainingSetup, layer: int, symbol: str, start: int, end: int) -> float:
    model, software = setup.model, setup.software
    rows = setup.micro_batch_size * (end - start) / setup.context_parallel
    kept = rows * block_bytes(setup, symbol) / setup.tensor_parallel
    if symbol == "-" and not software.fuses_kernels:
        into = BYTES * (2 if model.is_gated else 1) * model.ffn_hidden_size
        return _UNFUSED_ACTIVATION * rows * into / setup.tensor_parallel
    if symbol != "*":
        return kept
    # The kernel returns gradients of all keys and values that it was given, and sums those of the queries in 32 bit.
    of_queries = 4 * rows * model.num_heads * model.head_dim / setup.tensor_parallel
    found = kept + BYTES * keys_values_of(setup, layer, end) + of_queries
    if not software.flash_attention:
        # Scores, their softmax and the mask of its dropout, if they are computed again; and gradients of both.
        each = 2 * BYTES + (5 if setup.recompute == "selective" else 0)
        found += each * rows * end * model.num_heads / setup.tensor_parallel / setup.context_parallel
    return found
