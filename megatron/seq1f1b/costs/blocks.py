"""What the layers of a model are made of: products, attention and recurrences; their parameters and FLOPs.

Times and bytes follow from this one description, too. A multiply-add counts as two FLOPs. Norms, activations and the
softmax count as none: they are part of the achieved throughput.

Tested in costs/test_stage_costs.py.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from .model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape

BYTES = 2  # of an element, in 16 bit
# Tokens that the kernels of recurrent layers compute at once.
_DELTA_NET_CHUNK = 64
_MAMBA_CHUNK = 128
# FLOPs of matrix products that take as long as a FLOP of the gated delta rule by the kernels of flash-linear-attention,
# forward and backward: for 8,192 tokens and 32 heads of 128 these take 0.472 and 1.444 ms on an H200
# (QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt), 77 and 51 TFLOPS, where products reach 574.
_DELTA_NET_SLOWER = (7.4, 11.3)


class Product(NamedTuple):
    """The weight of a matrix product. Tensor-parallel ranks share its outputs, its inputs or (with "") nothing."""

    outputs: float
    inputs: float
    shared: str = "outputs"

    @property
    def size(self) -> float:
        return self.outputs * self.inputs

    def on_rank(self, ranks: int) -> "Product":
        """The part of one of `ranks` tensor-parallel ranks."""
        if self.shared == "outputs":
            return self._replace(outputs=self.outputs / ranks)
        if self.shared == "inputs":
            return self._replace(inputs=self.inputs / ranks)
        return self


class Attention(NamedTuple):
    """Heads of queries, and of keys and values; numbers in a query or key, and in a value."""

    heads: float
    kv_heads: float
    score_dim: int
    value_dim: int

    @property
    def keys_values(self) -> float:
        """Numbers in the keys and values of a token."""
        return self.kv_heads * (self.score_dim + self.value_dim)


@dataclass(frozen=True)
class Block:
    """A norm and what follows it until the residual stream, for one token."""

    products: tuple[Product, ...]
    vectors: float  # parameters beside products: norms, biases, convolutions
    kept: float  # bytes inside the block that the backward needs
    moved: float  # numbers that kernels read and write between products
    attention: Attention | None = None
    attended: float = 0  # the part of `kept` that is attention's output and log-sum-exp
    activated: float = 0  # the part of `kept` that activation functions of experts return
    exchanged: float = 0  # numbers that context-parallel ranks exchange around a recurrence
    scan: float = 0  # FLOPs of a recurrence
    scan_slower: tuple[float, float] = (1.0, 1.0)  # than products, for each FLOP, forward and backward
    state: float = 0  # bytes that a recurrence passes to the next segment, whatever its length
    expert: tuple[Product, ...] = ()  # the products of one routed expert, which no ranks share
    experts: int = 0  # routed experts
    active: int = 0  # routed experts of a token
    symbol: str = ""  # the name of such a block in hybrid models

    @property
    def up_projections(self) -> tuple[Product, ...]:
        """The products of multi-latent attention from latents to heads."""
        return (self.products[-4], self.products[-2])  # of queries, and of keys and values

    def on_rank(self, ranks: int) -> "Block":
        """The part of one of `ranks` tensor-parallel ranks; each has at least one head of keys and values."""
        divided = ("vectors", "kept", "moved", "attended", "activated", "exchanged", "scan", "state")
        parts: dict[str, Any] = {name: getattr(self, name) / ranks for name in divided}
        if self.attention is not None:
            heads = self.attention.heads / ranks
            kv_heads = max(1, self.attention.kv_heads / ranks)
            parts["attention"] = self.attention._replace(heads=heads, kv_heads=kv_heads)
        products = tuple(product.on_rank(ranks) for product in self.products)
        return replace(self, products=products, **parts)


@lru_cache(maxsize=1024)
def blocks_of(model: ModelShape, layer: int, tensor_parallel: int = 1) -> tuple[Block, ...]:
    """The blocks of layer number `layer`, on one tensor-parallel rank. Raises ValueError for an unknown one."""
    blocks = (replace(_block(model, symbol), symbol=symbol) for symbol in model.blocks(layer))
    return tuple(block if tensor_parallel == 1 else block.on_rank(tensor_parallel) for block in blocks)


def _block(model: ModelShape, symbol: str) -> Block:
    match symbol:
        case "*":
            return _attention(model)
        case "+" if model.latent is not None:
            return _latent_attention(model, model.latent)
        case "-":
            return _feed_forward(model, model.ffn_hidden_size)
        case "E" if model.experts is not None:
            return _experts(model, model.experts)
        case "G" if model.delta_net is not None:
            return _delta_net(model.hidden_size, model.delta_net)
        case "M" if model.mamba is not None:
            return _mamba(model.hidden_size, model.mamba)
    raise ValueError(
        f"--hybrid-layer-pattern has a layer {symbol} of unknown cost; give the flags of its sizes, such as "
        "--num-experts of E and --mamba-num-heads of M, or train with --sequence-split-strategy even"
    )


def _attention(model: ModelShape) -> Block:
    hidden = model.hidden_size
    heads = model.num_heads
    size = model.head_dim
    kv_heads = model.num_kv_heads or heads
    width = heads * size
    kv_width = kv_heads * size
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
    hidden = model.hidden_size
    heads = model.num_heads
    score = latent.head_dim + latent.rotary_head_dim
    rotary = latent.rotary_head_dim
    queries = heads * score
    values = heads * latent.value_head_dim
    query = [Product(queries, latent.query_rank or hidden)]
    if latent.query_rank:
        query.insert(0, Product(latent.query_rank, hidden, ""))
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


def _feed_forward(model: ModelShape, width: int) -> Block:
    into = width * (2 if model.is_gated else 1)  # the columns that go into the activation function
    products = (Product(into, model.hidden_size), Product(model.hidden_size, width, "inputs")) if width else ()
    return Block(products, vectors=7 * model.hidden_size, kept=BYTES * (into + width), moved=into + width)


def _experts(model: ModelShape, experts: Experts) -> Block:
    shared = _feed_forward(model, experts.shared_ffn_hidden_size)
    routed = _feed_forward(model, experts.ffn_hidden_size)
    return replace(
        shared,
        # What experts receive, and compute from it. What they return is weighted, and not kept.
        kept=shared.kept + experts.active * (BYTES * model.hidden_size + routed.kept),
        activated=BYTES * experts.active * experts.ffn_hidden_size,
        expert=routed.products,
        experts=experts.total,
        active=experts.active,
    )


def _delta_net(hidden: int, net: DeltaNet) -> Block:
    """The chunked gated delta rule (arXiv 2412.06464, section 3.3)."""
    heads = net.value_heads
    key = net.key_head_dim
    value = net.value_head_dim
    keys = net.key_heads * key
    values = heads * value
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
        scan_slower=_DELTA_NET_SLOWER,
        state=4 * heads * key * value + BYTES * (net.convolution - 1) * convolved,
    )


def _mamba(hidden: int, mamba: Mamba) -> Block:
    """The chunked scan (arXiv 2405.21060, section 6)."""
    width = mamba.heads * mamba.head_dim
    states = mamba.groups * mamba.state_dim
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


def layer_kinds(model: ModelShape, layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The kinds of these layers: the number of the first layer of the kind in the model, and how many are here."""
    first = _first_of_kind(model)
    return tuple(sorted(Counter(first[layer] for layer in layers).items()))


@lru_cache(maxsize=256)
def _first_of_kind(model: ModelShape) -> tuple[int, ...]:
    """The number of the first layer that is like a layer, for every layer."""
    first: dict[tuple[str, int | None], int] = {}
    of_layers = []
    for layer in range(model.num_layers):
        kind = (model.blocks(layer), model.window_of(layer))
        first.setdefault(kind, layer)
        of_layers.append(first[kind])
    return tuple(of_layers)


class Parameters(NamedTuple):
    """How many parameters there are; a mean over ranks that share them need not be a whole number."""

    dense: float  # of all but routed experts
    routed: float  # of routed experts


@lru_cache(maxsize=1024)
def layer_parameters(model: ModelShape, layer: int, tensor_parallel: int = 1) -> Parameters:
    """The parameters of a layer on one tensor-parallel rank, with all its routed experts."""
    dense = routed = 0.0
    for block in blocks_of(model, layer, tensor_parallel):
        router = model.hidden_size * block.experts
        dense += sum(product.size for product in block.products) + block.vectors + router
        routed += block.experts * sum(product.size for product in block.expert)
    return Parameters(dense, routed)


def parameters_of_model(model: ModelShape) -> float:
    """All weights. The embedding and the projection to the vocabulary count separately, even if they are tied."""
    kinds = layer_kinds(model, range(model.num_layers))
    of_layers = sum(count * sum(layer_parameters(model, layer)) for layer, count in kinds)
    return of_layers + 2 * (model.vocab_size * model.hidden_size)


class Flops(NamedTuple):
    """FLOPs of a forward."""

    per_token: float
    per_pair: float  # of a query and a key that it sees


def layer_flops(model: ModelShape, layer: int) -> Flops:
    """The FLOPs of the forward of a layer. Raises ValueError for an unknown one."""
    per_token = per_pair = 0.0
    for block in blocks_of(model, layer):
        routed = block.active * sum(product.size for product in block.expert)
        router = model.hidden_size * block.experts
        per_token += 2 * (sum(product.size for product in block.products) + routed + router) + block.scan
        if block.attention:
            per_pair += 2 * block.attention.heads * (block.attention.score_dim + block.attention.value_dim)
    return Flops(per_token, per_pair)


def head_flops(model: ModelShape) -> int:
    """FLOPs of a token to the vocabulary, and in the joining of prediction heads (arXiv 2412.19437, section 2.2)."""
    depth = model.prediction_depth
    return 2 * (1 + depth) * model.hidden_size * model.vocab_size + 4 * depth * model.hidden_size**2


class PaperFlops(NamedTuple):
    """FLOPs of the forward of a whole model, as the authors of Seq1F1B count them."""

    per_token: int
    per_pair: int  # of a query and a key that it sees


def paper_flops(model: ModelShape) -> PaperFlops:
    """The FLOPs by which `uniform_comp` cuts (arXiv 2406.03488, section 3.4): without experts, gates and shared KV
    heads."""
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    per_token = model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size
    per_pair = model.num_layers * model.num_heads * (4 * model.head_dim + 3)
    return PaperFlops(per_token, per_pair)


@lru_cache
def model_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences, forward and backward, without what is computed again."""
    layers = [*range(model.num_layers), *[model.num_layers - 1] * model.prediction_depth]
    total = float(head_flops(model) * sequence_length)
    for layer, count in layer_kinds(model, layers):
        per_token, per_pair = layer_flops(model, layer)
        total += count * (per_token * sequence_length + per_pair * pairs(0, sequence_length, model.window_of(layer)))
    return 3.0 * batch * total


def pairs(start: int, end: int, window: int | None) -> float:
    """The pairs of a query in [start, end) and a key that it sees: its own, and at most `window` before it."""
    if window is None or window >= end:
        return (end - start) * (start + end + 1) / 2
    growing = max(0, window - start)  # tokens that still see the start of the sequence
    return growing * (2 * start + growing + 1) / 2 + (end - start - growing) * (window + 1)
