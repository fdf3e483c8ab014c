"""The sizes of a GPT model that decide what a segment costs, and the parameters that they make."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from ...errors import ParameterError


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
class DeltaNet:
    """A gated delta net: queries and keys in `key_heads` of `key_head_dim`, values and states in `value_heads` of
    `value_head_dim`; a convolution over `convolution` tokens before them."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolution: int = 4


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer: `heads` of `head_dim`, each with a state of `state_dim` columns; input and output projections of
    the states are shared by the heads of one of `groups`; a convolution over `convolution` tokens before them."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    convolution: int = 4


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the whole model, before it is cut over ranks.

    `head_dim` is the size of one attention head; `vocab_size` is the padded vocabulary. `num_kv_heads` is None without
    grouped-query attention. `is_gated`: the feed-forward block has three matrices (SwiGLU) instead of two (GELU).
    `expert_layers` numbers, from 0, the layers that hold `experts`. In `window_layers` a query sees at most `window`
    keys before its own. `prediction_depth` more layers, each with a projection to the vocabulary, predict tokens after
    the next. A hybrid model has a `pattern` of one symbol a layer, as Megatron names them: * attention,
    + latent attention, - feed-forward, E experts, G gated delta net, M Mamba-2.
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
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    pattern: str | None = None
    delta_net: DeltaNet | None = None
    mamba: Mamba | None = None
    prediction_depth: int = 0

    def blocks(self, layer: int) -> str:
        """What layer number `layer`, counted from 0, is made of, as Megatron names the layers of hybrid models."""
        if self.pattern is not None:
            return self.pattern[layer]
        return "*E" if self.experts is not None and layer in self.expert_layers else "*-"


def parameters_of(model: ModelShape, blocks: str) -> float:
    """Weights of the matrices of a layer of these blocks, its convolution, norms and biases; of experts, those of the
    shared ones and the router. Raises ParameterError for blocks whose sizes are not known."""
    return sum(_parameters_of_block(model, symbol) for symbol in blocks)


def _parameters_of_block(model: ModelShape, symbol: str) -> float:
    hidden, matrices = model.hidden_size, 3 if model.is_gated else 2
    match symbol:
        case "*":
            width = model.num_heads * model.head_dim
            kv_width = (model.num_kv_heads or model.num_heads) * model.head_dim
            return hidden * (2 * width + 2 * kv_width + 6)
        case "-":
            return hidden * (matrices * model.ffn_hidden_size + 7)
        case "E" if model.experts is not None:
            return hidden * (matrices * model.experts.shared_ffn_hidden_size + model.experts.total + 7)
        case "G" if model.delta_net is not None:
            net = model.delta_net
            keys, values = net.key_heads * net.key_head_dim, net.value_heads * net.value_head_dim
            products = hidden * (2 * keys + 3 * values + 2 * net.value_heads)
            return products + net.convolution * (2 * keys + values) + 2 * net.value_heads + net.value_head_dim + hidden
        case "M" if model.mamba is not None:
            mamba = model.mamba
            width, states = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state_dim
            products = hidden * (3 * width + states + mamba.heads)
            return products + (mamba.convolution + 1) * (width + states) + 3 * mamba.heads + width + hidden
    raise ParameterError("{pattern.name} has a layer {0} whose size is not known", symbol)


@lru_cache(maxsize=4096)
def parameters_of_layers(model: ModelShape, layers: range) -> float:
    counts = Counter(model.blocks(layer) for layer in layers)
    return sum(count * parameters_of(model, blocks) for blocks, count in counts.items())


def parameters_of_experts(model: ModelShape) -> float:
    """Weights of the routed experts of one layer."""
    if model.experts is None:
        return 0.0
    return model.experts.total * (3 if model.is_gated else 2) * model.hidden_size * model.experts.ffn_hidden_size


def parameters_of_model(model: ModelShape) -> float:
    """All weights, embedding and projection to the vocabulary apart from each other."""
    layers = range(model.num_layers)
    experts = sum("E" in model.blocks(layer) for layer in layers) * parameters_of_experts(model)
    return parameters_of_layers(model, layers) + experts + 2 * model.vocab_size * model.hidden_size
