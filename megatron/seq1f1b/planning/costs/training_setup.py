"""What a training step computes, and on how many ranks: with a machine, all that its time and memory follow from."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from ...schedule import Placement, Shape, choose
from .model_shape import ModelShape, parameters_of, parameters_of_experts, parameters_of_layers
from .operations import Group


@dataclass(frozen=True)
class TrainingSetup:
    """`segments` are the lengths in tokens, first to last; `recompute` is "none", "selective" or "full".

    `layers_per_stage` has one entry a stage in the order of depth. Ranks are numbered as Megatron does: tensor parallel
    fastest, then context, data, pipeline. Experts are spread over `expert_parallel` of the ranks of a pipeline rank and
    are not cut (--expert-tensor-parallel-size 1). With `overlaps_data_parallel` gradients of a model chunk are summed,
    and its parameters gathered, beside the compute of others (--overlap-grad-reduce, --overlap-param-gather). Raises
    ValueError for sizes that do not fit.

    A subclass stands for another program: functions of a set-up that are marked `singledispatch` can have another form
    for it. tools/paper has those of the papers.
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
    overlaps_data_parallel: bool = False
    gradient_bytes: ClassVar[int] = 4  # of a gradient that is summed

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
        return Group(self.context_parallel * self.data_parallel, self.tensor_parallel)

    @property
    def pipeline_stride(self) -> int:
        """How far apart the numbers of neighbours in the pipeline are."""
        return self.tensor_parallel * self.context_parallel * self.data_parallel

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
        count = parameters_of_layers(self.model, self.layers_of(stage)) / self.tensor_parallel
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
