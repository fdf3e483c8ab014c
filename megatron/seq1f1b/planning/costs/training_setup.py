"""What a training step computes, and on how many ranks: with a machine, all that its time and memory follow from."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ...errors import ParameterError
from ...schedule import Placement, Shape, choose
from .model_shape import ModelShape
from .operations import Group


@dataclass(frozen=True)
class Software:
    """How the program runs the step; the defaults are those of this package.

    - `flash_attention`: no scores in memory.
    - `overlaps_messages`: ranks compute while messages travel; otherwise both sides of a message wait for it, as in
      Megatron's schedules without --overlap-p2p-communication.
    - `overlaps_tensor_parallel`: collectives of the backward run beside weight gradients.
    - `overlaps_data_parallel`: gradients of a model chunk are summed, and its parameters gathered, beside the compute
      of others (--overlap-grad-reduce, --overlap-param-gather).
    - `concatenates_prefix`: keys and values of a segment are joined to copies of those before it, as in the code of
      the authors of Seq1F1B, and not written into one buffer.
    - `gradient_bytes`: the size of a gradient that is summed.
    - `fuses_kernels`: activation functions, rotary positions and the loss are one kernel each, and hold no terms in
      between; softmax that is not fused casts its scores to 32 bit and back.
    - `scatters_messages`: each tensor-parallel rank sends its part of a message (arXiv 2104.04473, section 4.1);
      otherwise one of them sends all, which the receivers broadcast.
    - `adds_gradients_last`: the gradients of weights are added to those there when the input gradient is on its way,
      which is the W of a schedule, as in the code of the authors of TeraPipe.
    - `frees_late`: the host runs ahead, and tensors of tensor-parallel collectives stay until the device is done with
      the action (PyTorch before 2.8, unless TORCH_NCCL_AVOID_RECORD_STREAMS is set).
    """

    flash_attention: bool = True
    overlaps_messages: bool = True
    overlaps_tensor_parallel: bool = True
    overlaps_data_parallel: bool = False
    concatenates_prefix: bool = False
    gradient_bytes: int = 4
    dropout: bool = False
    fuses_kernels: bool = True
    scatters_messages: bool = True
    adds_gradients_last: bool = False
    frees_late: bool = False


@dataclass(frozen=True)
class TrainingSetup:
    """`segments` are the lengths in tokens, first to last; `recompute` is "none", "selective" or "full".

    `layers_per_stage` has one entry a stage in the order of depth. Ranks are numbered as Megatron does: tensor parallel
    fastest, then context, data, pipeline; `pipeline_before_data` swaps the last two (--use-tp-pp-dp-mapping). Experts
    are spread over `expert_parallel` of the ranks of a pipeline rank and are not cut (--expert-tensor-parallel-size 1).
    Raises ValueError for sizes that do not fit.
    """

    model: ModelShape
    sequence_length: int
    num_microbatches: int
    micro_batch_size: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 1
    placement: Placement = field(default_factory=lambda: Placement(1))
    family: str = "1f1b"
    segments: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"
    distributed_optimizer: bool = False
    tied_embeddings: bool = False
    pipeline_before_data: bool = False
    software: Software = Software()

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.sequence_length,))
        if not self.layers_per_stage:
            object.__setattr__(self, "layers_per_stage", even_layers(self.model.num_layers, self.placement.num_stages))
        if sum(self.segments) != self.sequence_length:
            raise ValueError(f"segments of {sum(self.segments)} tokens do not make {self.sequence_length}")
        if (
            len(self.layers_per_stage) != self.placement.num_stages
            or sum(self.layers_per_stage) != self.model.num_layers
        ):
            raise ValueError(
                f"{self.placement.num_stages} stages of {list(self.layers_per_stage)} layers are not the "
                f"{self.model.num_layers} layers of the model"
            )
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute={self.recompute!r}; it is 'none', 'selective' or 'full'")

    @property
    def shape(self) -> Shape:
        return Shape(self.placement, self.num_microbatches, len(self.segments))

    @property
    def pipeline_parallel(self) -> int:
        return self.placement.num_ranks

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.data_parallel * self.pipeline_parallel

    @property
    def token_shares(self) -> int:
        """How many tensor-parallel ranks share the tokens outside of products, as sequence parallelism lets them."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def global_batch_size(self) -> int:
        return self.num_microbatches * self.micro_batch_size * self.data_parallel

    @property
    def splits_backward(self) -> bool:
        """Whether its schedule computes weight gradients apart."""
        return _splits_backward(self.family)

    @property
    def tensor_group(self) -> Group:
        return Group(self.tensor_parallel, 1)

    @property
    def context_group(self) -> Group:
        return Group(self.context_parallel, self.tensor_parallel)

    @property
    def data_group(self) -> Group:
        """The ranks that hold the same parameters and sum their gradients."""
        stride = self.tensor_parallel * (self.pipeline_parallel if self.pipeline_before_data else 1)
        return Group(self.context_parallel * self.data_parallel, stride)

    @property
    def pipeline_stride(self) -> int:
        stride = self.tensor_parallel * self.context_parallel
        return stride if self.pipeline_before_data else stride * self.data_parallel

    @property
    def expert_group(self) -> Group:
        return Group(self.expert_parallel, 1)

    @property
    def expert_data_group(self) -> Group:
        """The ranks that hold the same experts."""
        ranks = self.tensor_parallel * self.context_parallel * self.data_parallel
        return Group(max(1, ranks // self.expert_parallel), self.expert_parallel)

    @cached_property
    def stage_layers(self) -> tuple[tuple[int, int], ...]:
        """How many layers without and with experts each stage has."""
        found, first = [], 0
        for count in self.layers_per_stage:
            sparse = sum("E" in self.model.blocks(layer) for layer in range(first, first + count))
            found.append((count - sparse, sparse))
            first += count
        return tuple(found)

    def layers_of(self, stage: int) -> range:
        """The numbers of the layers of a stage in the model."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def layer_parameters(self, has_experts: bool = False) -> float:
        """Parameters of one layer of a GPT on one rank, without its routed experts."""
        return parameters_of(self.model, "*E" if has_experts else "*-") / self.tensor_parallel

    @cached_property
    def layer_expert_parameters(self) -> float:
        """Parameters of the routed experts of one layer on one rank."""
        return parameters_of_experts(self.model) / self.expert_parallel

    @cached_property
    def embedding_parameters(self) -> float:
        return self.model.vocab_size * self.model.hidden_size / self.tensor_parallel

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one stage on one rank; the first holds the embedding, the last the projection to the
        vocabulary."""
        count = _parameters_of_all(self.model, self.layers_of(stage)) / self.tensor_parallel
        last = self.placement.num_stages - 1
        count += self.embedding_parameters * ((stage == 0) + (stage == last))
        return count - self.embedding_parameters if self.tied_embeddings and last == 0 else count

    def stage_expert_parameters(self, stage: int) -> float:
        """Parameters of the routed experts of one stage on one rank."""
        return self.stage_layers[stage][1] * self.layer_expert_parameters


@lru_cache
def _splits_backward(family: str) -> bool:
    return choose(family).splits_backwards


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they can be; the first stages take one more."""
    base, more = divmod(num_layers, num_stages)
    return tuple(base + (stage < more) for stage in range(num_stages))


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
def _parameters_of_all(model: ModelShape, layers: range) -> float:
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
    return _parameters_of_all(model, layers) + experts + 2 * model.vocab_size * model.hidden_size
