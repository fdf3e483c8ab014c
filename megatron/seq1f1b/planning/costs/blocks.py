"""What the layers of a model are made of: products, attention and recurrences, whole, before ranks share them.

FLOPs, parameters, times and bytes all follow from this one description. Only what grows with the model is counted:
norms, activations and the softmax are part of the achieved throughput.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from .model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape

BYTES = 2  # of an element, in 16 bit
# Tokens that the kernels of recurrent layers compute at once; that of gated delta nets solves a triangular system.
_DELTA_NET_CHUNK, _MAMBA_CHUNK = 64, 128


class Product(NamedTuple):
    """The weight of a matrix product. Tensor-parallel ranks share its outputs or its inputs; "": each has all of it."""

    outputs: int
    inputs: int
    shared: str = "outputs"

    def on_rank(self, tensor_parallel: int) -> tuple[float, float]:
        """The outputs and inputs of one rank."""
        return (
            self.outputs / (tensor_parallel if self.shared == "outputs" else 1),
            self.inputs / (tensor_parallel if self.shared == "inputs" else 1),
        )

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


class Attention(NamedTuple):
    """Heads of queries, and of keys and values; numbers in a query or key, and in a value."""

    heads: int
    kv_heads: int
    score_dim: int
    value_dim: int

    @property
    def flops(self) -> int:
        """Of the forward, for a query and a key that it sees."""
        return 2 * self.heads * (self.score_dim + self.value_dim)

    def keys_values(self, tensor_parallel: int) -> float:
        """Numbers in the keys and values of a token on one rank; more ranks than there are heads have one each."""
        return max(1, self.kv_heads / tensor_parallel) * (self.score_dim + self.value_dim)


@dataclass(frozen=True)
class Block:
    """A norm and what follows it until the residual stream.

    `vectors` counts the parameters beside products: norms, biases, convolutions. `expert` has the products of one of
    `experts` routed experts, of which a token goes through `active`. All else is for one token, but `state`, the bytes
    that a recurrence passes to the next segment:

    - `kept`: the bytes inside the block that the backward needs; `attended` is the part of attention's output and
      log-sum-exp, `activated` the part that activation functions of experts return
    - `moved`: the numbers that kernels read and write between products
    - `exchanged`: the numbers that context-parallel ranks exchange around a recurrence
    - `scan`: the FLOPs of a recurrence
    """

    products: tuple[Product, ...]
    vectors: int
    kept: int
    moved: int
    attention: Attention | None = None
    attended: int = 0
    activated: int = 0
    exchanged: int = 0
    expert: tuple[Product, ...] = ()
    experts: int = 0
    active: int = 0
    scan: int = 0
    state: int = 0


@lru_cache(maxsize=1024)
def blocks_of(model: ModelShape, layer: int) -> tuple[Block, ...]:
    """The blocks of layer number `layer`. Raises ValueError where one is not known."""
    return tuple(_block(model, symbol) for symbol in model.blocks(layer))


def _block(model: ModelShape, symbol: str) -> Block:
    hidden = model.hidden_size
    match symbol:
        case "*":
            return _attention(model)
        case "+" if model.latent is not None:
            return _latent_attention(model, model.latent)
        case "-":
            return Block(*_feed_forward(model, model.ffn_hidden_size))
        case "E" if model.experts is not None:
            return _experts(model, model.experts)
        case "G" if model.delta_net is not None:
            return _delta_net(hidden, model.delta_net)
        case "M" if model.mamba is not None:
            return _mamba(hidden, model.mamba)
    raise ValueError(
        f"--hybrid-layer-pattern has a layer {symbol} whose cost is not known; use --sequence-split-strategy even"
    )


def _attention(model: ModelShape) -> Block:
    hidden, heads, size = model.hidden_size, model.num_heads, model.head_dim
    kv_heads = model.num_kv_heads or heads
    width, kv_width = heads * size, kv_heads * size
    normed = width + kv_width if model.has_qk_norms else 0
    return Block(
        products=(Product(width + 2 * kv_width, hidden), Product(hidden, width, "inputs")),
        vectors=6 * hidden,
        # Queries and the output; the log-sum-exp of each head; queries and keys before their norms.
        kept=2 * BYTES * width + 4 * heads + BYTES * normed,
        moved=4 * (width + kv_width) + 2 * normed,  # rotary positions of queries and keys, and their layout
        attention=Attention(heads, kv_heads, size, size),
        attended=BYTES * width + 4 * heads,
    )


def _latent_attention(model: ModelShape, latent: LatentAttention) -> Block:
    hidden, heads = model.hidden_size, model.num_heads
    score, rotary = latent.head_dim + latent.rotary_head_dim, latent.rotary_head_dim
    queries, values = heads * score, heads * latent.value_head_dim
    query = (
        (Product(latent.query_rank, hidden, ""), Product(queries, latent.query_rank))
        if latent.query_rank
        else (Product(queries, hidden),)
    )
    up = Product(heads * (latent.head_dim + latent.value_head_dim), latent.kv_rank)
    ranks = latent.query_rank + latent.kv_rank + rotary
    return Block(
        products=(*query, Product(latent.kv_rank + rotary, hidden, ""), up, Product(hidden, values, "inputs")),
        vectors=2 * hidden + latent.query_rank + latent.kv_rank,
        kept=BYTES * (queries + values + 2 * ranks) + 4 * heads,  # latents before and after their norms
        moved=6 * queries + 4 * ranks,
        attention=Attention(heads, heads, score, latent.value_head_dim),
        attended=BYTES * values + 4 * heads,
    )


def _feed_forward(model: ModelShape, width: int) -> tuple[tuple[Product, ...], int, int, int]:
    """Products, vectors, kept and moved of a feed-forward block of this width."""
    into = width * (2 if model.is_gated else 1)  # the columns that go into the activation function
    products = (Product(into, model.hidden_size), Product(model.hidden_size, width, "inputs")) if width else ()
    return products, 7 * model.hidden_size, BYTES * (into + width), into + width


def _experts(model: ModelShape, experts: Experts) -> Block:
    products, vectors, kept, moved = _feed_forward(model, experts.shared_ffn_hidden_size)
    routed, _, of_routed, _ = _feed_forward(model, experts.ffn_hidden_size)
    # What experts get, and compute from it. They weigh what they return, so nobody keeps that.
    kept += experts.active * (BYTES * model.hidden_size + of_routed)
    activated = BYTES * experts.active * experts.ffn_hidden_size
    return Block(
        products, vectors, kept, moved, activated=activated, expert=routed, experts=experts.total, active=experts.active
    )


def _delta_net(hidden: int, net: DeltaNet) -> Block:
    """The chunked gated delta rule (arXiv 2412.06464, section 3.3)."""
    heads, key, value = net.value_heads, net.key_head_dim, net.value_head_dim
    keys, values = net.key_heads * key, heads * value
    convolved = 2 * keys + values
    # The state is read by keys and by queries, and written; in a chunk a token meets half of the others: two scores,
    # the triangular system for keys and values, and the output.
    scan = heads * (3 * key * value + _DELTA_NET_CHUNK * (3 * key + 2 * value) // 2)
    # Queries and keys for each head of the values; values; the output before and after the norm, and its gate; what
    # solves a chunk; decay and strength.
    kept = 2 * convolved + 2 * heads * key + 4 * values + heads * _DELTA_NET_CHUNK
    return Block(
        products=(Product(convolved + values + 2 * heads, hidden), Product(hidden, values, "inputs")),
        vectors=net.convolution * convolved + 2 * heads + value + hidden,
        kept=BYTES * kept + 8 * heads,
        moved=2 * kept,
        exchanged=convolved + 3 * values,
        scan=2 * scan,
        state=4 * heads * key * value + BYTES * (net.convolution - 1) * convolved,
    )


def _mamba(hidden: int, mamba: Mamba) -> Block:
    """The chunked scan (arXiv 2405.21060, section 6)."""
    width, states = mamba.heads * mamba.head_dim, mamba.groups * mamba.state_dim
    convolved = width + 2 * states
    # The state is written and read; in a chunk a token meets half of the others: one score and the output.
    scan = 2 * width * mamba.state_dim + _MAMBA_CHUNK * (states + width) // 2
    kept = 2 * convolved + 3 * width  # the output before and after the norm, and its gate
    return Block(
        products=(Product(convolved + width + mamba.heads, hidden), Product(hidden, width, "inputs")),
        vectors=(mamba.convolution + 1) * convolved + 3 * mamba.heads + width + hidden,
        kept=BYTES * kept + 8 * mamba.heads,  # the steps
        moved=2 * kept,
        exchanged=convolved + 2 * width,
        scan=2 * scan,
        state=4 * width * mamba.state_dim + BYTES * (mamba.convolution - 1) * convolved,
    )


@lru_cache(maxsize=4096)
def layer_kinds(model: ModelShape, layers: range) -> Mapping[int, int]:
    """How many of these layers are of each kind. A kind has the number of its first layer in the model."""
    first = _first_of_kind(model)
    return MappingProxyType(Counter(first[layer] for layer in layers))


@lru_cache(maxsize=256)
def _first_of_kind(model: ModelShape) -> tuple[int, ...]:
    first: dict[tuple[str, int | None], int] = {}
    return tuple(
        first.setdefault((model.blocks(layer), model.window_of(layer)), layer) for layer in range(model.num_layers)
    )


@lru_cache(maxsize=1024)
def layer_parameters(model: ModelShape, layer: int, tensor_parallel: int = 1) -> float:
    """Parameters of a layer on one tensor-parallel rank, without its routed experts."""
    total = 0.0
    for block in blocks_of(model, layer):
        products = sum(prod(product.on_rank(tensor_parallel)) for product in block.products)
        router = model.hidden_size * block.experts
        total += products + block.vectors / tensor_parallel + router
    return total


@lru_cache(maxsize=1024)
def expert_parameters(model: ModelShape, layer: int) -> int:
    """Parameters of the routed experts of a layer."""
    return sum(block.experts * product.size for block in blocks_of(model, layer) for product in block.expert)


def parameters_of_model(model: ModelShape) -> float:
    """All weights, embedding and projection to the vocabulary apart from each other."""
    kinds = layer_kinds(model, range(model.num_layers)).items()
    layers = sum(count * (layer_parameters(model, layer) + expert_parameters(model, layer)) for layer, count in kinds)
    return layers + 2 * model.vocab_size * model.hidden_size
