"""What a training step computes, and on which ranks. Its time and memory follow from this and a machine.

Tested in costs/test_training_setup.py and commands/test_launch_flags.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Self

from ..partition import even
from ..schedule import PAIRED, Placement, ScheduleChoice, Shape
from .blocks import BYTES, Block, Parameters, blocks_of, layer_kinds, layer_parameters
from .cache_keys import equal_by_fields, field_names, hash_once, values_of_fields
from .machine import Group
from .model_shape import ModelShape

# What the backward computes again, besides nothing: whole layers, layers without attention, Megatron's modules.
FULL = "full"
ALL_BUT_ATTENTION = "all but attention"
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


class Moves(StrEnum):
    """What moves to the memory of a host, and back for the backward."""

    UNITS = "units"  # a share of the units that a rank holds (--offload-activations)
    MODULES = "modules"  # of every unit a share of what Megatron's modules can move
    LAYERS = "layers"  # of every unit all that some of the layers keep (--cpu-offloading-num-layers)


class Fsdp(StrEnum):
    """What replicas keep shares of by Megatron's FSDP, beside the state of the optimizer, by the words of
    --data-parallel-sharding-strategy. It sums gradients over replicas in 16 bit (--megatron-fsdp-grad-comm-dtype)."""

    OFF = "off"  # without --use-megatron-fsdp
    OPTIMIZER = "optim"  # nothing else: whole weights are gathered, and whole gradients summed, once a step
    GRADIENTS = "optim_grads"  # every backward sums its gradients
    PARAMETERS = "optim_grads_params"  # and weights: every forward and every backward gathers them


# Fields that do not matter to a single layer, unless a family splits backwards.
_NOT_OF_LAYERS = frozenset(("family", "layers_per_stage", "num_microbatches", "partitions_state", "placement"))


@lru_cache  # every set-up is checked, and a search makes many
def has_costs(recompute: str) -> bool:
    """Whether a TrainingSetup may recompute this."""
    return recompute in ("none", FULL, ALL_BUT_ATTENTION) or set() < set(recompute.split()) <= set(MODULES)


def choices_of(settings: Mapping[str, Any], layers_per_stage: tuple[int, ...], keeps_attention: bool) -> dict[str, Any]:
    """The fields of a TrainingSetup that follow from the names of Megatron's arguments. Names of other `recompute`
    modules than MODULES have no costs. Ranks that cut an expert, by default the tensor-parallel ones, count as if each
    had some of the experts."""
    granularity = settings.get("recompute_granularity")
    experts = 1
    share = 1.0
    recompute = ALL_BUT_ATTENTION if keeps_attention else granularity or "none"
    if granularity == "selective":
        recompute = " ".join(sorted(settings.get("recompute_modules") or ["core_attn"]))
    elif granularity == "full" and settings.get("recompute_method") == "block":
        share = min(1.0, (settings.get("recompute_num_layers") or 1) / max(layers_per_stage))
    if settings.get("num_experts"):
        tensor = settings.get("expert_tensor_parallel_size") or settings.get("tensor_model_parallel_size") or 1
        experts = tensor * (settings.get("expert_model_parallel_size") or 1)
    return {
        "layers_per_stage": layers_per_stage,
        "expert_parallel": experts,
        "sequence_parallel": bool(settings.get("sequence_parallel")),
        "recompute": recompute,
        "recomputed_share": share,
        "distributed_optimizer": bool(settings.get("use_distributed_optimizer")),
        "hides_tensor_exchange": bool(settings.get("tp_comm_overlap")),
        "dispatches_once": settings.get("moe_token_dispatcher_type") == "flex",
        "replays_layers": _replays_layers(settings),
        "fuses_loss": bool(settings.get("cross_entropy_loss_fusion"))
        and settings.get("cross_entropy_fusion_impl") == "te",
    }


def _replays_layers(settings: Mapping[str, Any]) -> bool:
    """Whether CUDA graphs replay attention and what follows it, but for experts. Without names of modules they replay
    whole layers."""
    if settings.get("cuda_graph_impl") in (None, "none"):
        return False
    modules = settings.get("cuda_graph_modules") or settings.get("cuda_graph_scope") or []
    names = {getattr(module, "name", module) for module in ([modules] if isinstance(modules, str) else modules)}
    others = {"moe_router", "moe"} if settings.get("num_experts") else {"mlp"}
    return not names or "full" in names or ("attn" in names and bool(names & others))


class StageLayers(NamedTuple):
    """The layers of a pipeline stage; those of equal costs are equal."""

    layers: tuple[tuple[int, int], ...]  # each kind, as the number of its first layer in the model, with its count
    is_first: bool  # has the embedding
    is_last: bool  # has the projection to the vocabulary and the loss

    @classmethod
    def of_layer(cls, layer: int) -> Self:
        """One layer, without embedding and loss."""
        return cls(((layer, 1),), is_first=False, is_last=False)


@lru_cache(maxsize=4096)
def _kinds_of_stages(
    model: ModelShape, layers_per_stage: tuple[int, ...]
) -> tuple[tuple[StageLayers, ...], tuple[int, ...]]:
    """The different stages of a model, and for each of its stages the number of the one that it equals."""
    stages = stages_of(model, layers_per_stage)
    kinds = tuple(dict.fromkeys(stages))
    numbers = {stage: number for number, stage in enumerate(kinds)}
    return kinds, tuple(numbers[stage] for stage in stages)


def of_stages[T](model: ModelShape, layers_per_stage: tuple[int, ...], function: Callable[[StageLayers], T]) -> list[T]:
    """The values of a function for all stages of a model. The function is called once for stages that are equal."""
    kinds, numbers = _kinds_of_stages(model, layers_per_stage)
    of_kinds = [function(stage) for stage in kinds]
    return [of_kinds[number] for number in numbers]


@lru_cache(maxsize=4096)
def stages_of(model: ModelShape, layers_per_stage: tuple[int, ...]) -> tuple[StageLayers, ...]:
    """The stages of a model. Prediction heads are on the last one, with layers like the last of the model."""
    stages = [[*range(start, end)] for start, end in pairwise(accumulate(layers_per_stage, initial=0))]
    stages[-1] += [model.num_layers - 1] * model.prediction_depth
    last = len(stages) - 1
    return tuple(StageLayers(layer_kinds(model, layers), n == 0, n == last) for n, layers in enumerate(stages))


@dataclass(frozen=True)
class TrainingSetup:
    """What runs, and on which ranks. `segments` are lengths in tokens, first to last; `layers_per_stage` has one entry
    per stage in the order of depth. Ranks are numbered as in Megatron: tensor parallel fastest, then context, data,
    pipeline. Raises ValueError for sizes that do not fit. Functions with `singledispatch` can have another form for a
    subclass, which stands for another program, as in tools/paper."""

    model: ModelShape
    sequence_length: int
    num_microbatches: int
    micro_batch_size: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1  # ranks of a pipeline rank that share the experts (--expert-tensor-parallel-size 1)
    data_parallel: int = 1
    placement: Placement = field(default_factory=lambda: Placement(1))
    family: str = "1f1b"
    segments: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"  # or FULL, ALL_BUT_ATTENTION, words of MODULES
    distributed_optimizer: bool = False
    tied_embeddings: bool = False
    overlaps_data_parallel: bool = False  # --overlap-grad-reduce, --overlap-param-gather
    partitions_state: bool = False  # replicas keep shares of weights and gradients; needs `distributed_optimizer`
    fsdp: Fsdp = Fsdp.OFF  # in Megatron's own schedules; needs `distributed_optimizer`
    keeps_logits: bool = False  # the loss is never taken in pieces
    fuses_loss: bool = False  # Transformer Engine's (--cross-entropy-loss-fusion, --cross-entropy-fusion-impl te)
    cp_comm_type: str | None = None  # how context-parallel ranks exchange whole sequences; None: the fastest way
    dispatches_once: bool = False  # a token goes once to a node or rank (--moe-token-dispatcher-type flex)
    hides_experts: bool = False  # --overlap-moe-expert-parallel-comm
    hides_tensor_exchange: bool = False  # --tp-comm-overlap, for segments of one length; needs `sequence_parallel`
    # CUDA graphs replay all of a layer but its experts (--cuda-graph-impl): the host launches these alone.
    replays_layers: bool = False
    recomputed_share: float = 1.0  # the part of the layers of a stage, with FULL (--recompute-method block)
    offloads: float = 0.0  # the share of what `moves` to the host
    moves: Moves = Moves.UNITS
    # Units move layer by layer, and at most so many layers leave at once (--offload-layers-leaving); 0: whole units.
    layers_leaving: int = 0
    # Pairs of a query and a key of each segment without windows, where documents are kept apart.
    seen: tuple[float, ...] = ()
    longest: int = 0  # tokens of the longest micro-batch of a step, where micro-batches differ in length
    # A set-up for each kind of micro-batch, where they differ (--unit-tokens). `segments` are then those of all kinds,
    # one kind after the other, and costs have as many columns.
    parts: tuple["TrainingSetup", ...] = ()
    gradient_bytes: ClassVar[int] = 4  # of a gradient that is summed

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.sequence_length,))
        if not self.layers_per_stage:
            object.__setattr__(self, "layers_per_stage", even(self.model.num_layers, self.placement.num_stages))
        if sum(self.segments) != self.sequence_length:
            raise ValueError(f"segments of {sum(self.segments)} tokens do not make {self.sequence_length}")
        layers = self.layers_per_stage
        stages = self.placement.num_stages
        if len(layers) != stages or sum(layers) != self.model.num_layers:
            raise ValueError(
                f"the {list(layers)} layers of {stages} stages do not add up to --num-layers {self.model.num_layers}"
            )
        if not has_costs(self.recompute):
            raise ValueError(
                f"--recompute-modules {self.recompute} has no costs; drop it, or rehearse the launch (--dry-run)"
            )

    __hash__ = hash_once
    __eq__ = equal_by_fields

    def but(self, **changes: Any) -> Self:
        """`dataclasses.replace`, several times faster: a search makes some hundred thousand set-ups."""
        changed = object.__new__(type(self))
        fields = vars(changed)
        names = field_names(type(self))  # type: ignore[arg-type]  # mypy takes no class for hashable
        fields.update(zip(names, values_of_fields(self), strict=True))
        fields.update(changes)
        changed.__post_init__()
        if "layer_setup" in vars(self) and self._shares_layers(changed, changes):
            fields["layer_setup"] = self.layer_setup  # which is computed already
        return changed

    def _shares_layers(self, changed: "TrainingSetup", names: Iterable[str]) -> bool:
        """Whether a set-up that differs from this one in these fields alone has the same `layer_setup`."""
        return _NOT_OF_LAYERS.issuperset(names) and not (self.splits_backward or changed.splits_backward)

    def without_recomputation(self) -> Self:
        """The set-up that computes nothing again, which takes the least time of all that differ in that alone."""
        return self if self.recompute == "none" else self.but(recompute="none", recomputed_share=1.0)

    @property
    def shape(self) -> Shape:
        return Shape(self.placement, self.num_microbatches, len(self.segments))

    @property
    def pipeline_parallel(self) -> int:
        return self.placement.num_ranks

    @property
    def pipeline_stride(self) -> int:
        """The distance between the numbers of two neighbours in the pipeline."""
        return self.tensor_parallel * self.context_parallel * self.data_parallel

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.data_parallel * self.pipeline_parallel

    @property
    def global_batch_size(self) -> int:
        return self.num_microbatches * self.micro_batch_size * self.data_parallel

    @property
    def splits_backward(self) -> bool:
        """Whether its schedule computes weight gradients apart."""
        return splits_backward(self.family)

    @property
    def has_pairs(self) -> bool:
        """Whether its order has pairs; Megatron's own order of whole sequences then has the same ones."""
        return self.hides_experts and self.family in PAIRED

    @property
    def routes_in_32_bit(self) -> bool:
        """Whether probabilities of experts have 32 bits: with a flex dispatcher they always do."""
        return self.dispatches_once or self.model.routes_in_32_bit

    @property
    def moves_parts(self) -> bool:
        """Whether a part of every unit moves to the host, as in Megatron, instead of some of the units."""
        return self.moves is not Moves.UNITS

    @property
    def moves_state(self) -> bool:
        return self.partitions_state and self.data_group.size > 1

    @property
    def shards_gradients(self) -> bool:
        """Whether replicas keep shares of gradients, which every backward sums, layer by layer."""
        return self.fsdp in (Fsdp.GRADIENTS, Fsdp.PARAMETERS)

    @property
    def shards_parameters(self) -> bool:
        """Whether replicas keep shares of weights, and gather each layer beside the one before it."""
        return self.fsdp is Fsdp.PARAMETERS

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute in (FULL, ALL_BUT_ATTENTION)

    @property
    def moves_by_layer(self) -> bool:
        """Whether units move to the host layer by layer, not as a whole."""
        return self.layers_leaving > 0

    @property
    def recomputes_up_projections(self) -> bool:
        """Whether the backward projects the latents of multi-latent attention up again."""
        return self.model.latent is not None and "mla_up_proj" in self.recompute.split()

    def repeats(self, symbol: str) -> bool:
        """Whether the backward computes a whole block of this symbol again, but not its whole layer."""
        return {"-": "mlp", "E": "moe"}.get(symbol) in self.recompute.split()

    @property
    def token_shares(self) -> int:
        """The number of ranks that share the tokens outside of products, by sequence parallelism."""
        return self.tensor_parallel if self.sequence_parallel else 1

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
    def expert_data_group(self) -> Group:
        """The ranks that hold the same experts."""
        ranks = self.num_devices // self.pipeline_parallel
        return Group(max(1, ranks // self.expert_parallel), self.expert_parallel)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The start and the end of each segment."""
        return list(pairwise(accumulate(self.segments, initial=0)))

    @cached_property
    def layer_setup(self) -> Self:
        """The set-up with a fixed value of all that does not matter to a single layer, as a key of caches. Equal ones
        are the same object, which caches find without a comparison, and whose own values are computed once."""
        alike = self.but(
            num_microbatches=1,
            data_parallel=self.data_parallel if self.shards_gradients else 1,
            fsdp=self.fsdp if self.shards_gradients else Fsdp.OFF,
            placement=Placement(1),
            layers_per_stage=(self.model.num_layers,),
            family=self.family if self.splits_backward else "1f1b",
            overlaps_data_parallel=False,
            partitions_state=False,
            hides_experts=self.hides_experts and self.repeats("E"),
            offloads=self.offloads if self.moves_parts else 0.0,
            moves=self.moves if self.offloads else Moves.UNITS,
            layers_leaving=0,
            parts=tuple(part.layer_setup for part in self.parts),
        )
        found: Self = _shared(alike)
        return found

    @cached_property
    def time_setup(self) -> Self:
        """As `layer_setup`, with a fixed value of all that does not matter to what a single layer computes and
        exchanges: what replicas shard, what the loss keeps, and who launches."""
        of_layer = self.layer_setup
        if of_layer is not self:
            return of_layer.time_setup
        alike = self.but(
            data_parallel=1,
            fsdp=Fsdp.OFF,
            keeps_logits=False,
            fuses_loss=False,
            replays_layers=False,
            offloads=0.0,
            moves=Moves.UNITS,
        )
        found: Self = _shared(alike)
        return found

    @cached_property
    def dense_setup(self) -> Self:
        """As `layer_setup`, with a fixed value of all that does not matter to the time of a layer's dense blocks."""
        of_activations = self.activation_setup
        if of_activations is not self:
            return of_activations.dense_setup
        alike = self.but(recompute="none", recomputed_share=1.0, keeps_logits=False, fuses_loss=False)
        found: Self = _shared(alike)
        return found

    @cached_property
    def activation_setup(self) -> Self:
        """As `layer_setup`, with a fixed value of all that does not matter to the activations that units keep if none
        of them move, nor to the embedding and the loss."""
        of_layer = self.layer_setup
        if of_layer is not self:
            return of_layer.activation_setup
        alike = self.but(
            data_parallel=1,
            expert_parallel=1,
            fsdp=Fsdp.OFF,
            family="1f1b",
            partitions_state=False,
            dispatches_once=False,
            hides_experts=False,
            hides_tensor_exchange=False,
            replays_layers=False,
            offloads=0.0,
            moves=Moves.UNITS,
            parts=tuple(part.activation_setup for part in self.parts),
        )
        found: Self = _shared(alike)
        return found

    @cached_property
    def state_setup(self) -> Self:
        """As `layer_setup`, with a fixed value of all that does not matter to parameters, gradients and the optimizer
        of ranks."""
        alike = self.but(
            num_microbatches=1,
            micro_batch_size=1,
            family="1f1b",
            segments=(),
            recompute="none",
            recomputed_share=1.0,
            keeps_logits=False,
            cp_comm_type=None,
            hides_experts=False,
            hides_tensor_exchange=False,
            replays_layers=False,
            offloads=0.0,
            moves=Moves.UNITS,
            layers_leaving=0,
            seen=(),
            longest=0,
            parts=(),
        )
        found: Self = _shared(alike)
        return found

    def rows(self, tokens: int) -> float:
        """The rows of the products of a rank, for `tokens` tokens of every sequence."""
        return self.micro_batch_size * tokens / self.context_parallel

    def whole_input(self, tokens: int) -> float:
        """Bytes of the residual stream around products, where tensor-parallel ranks do not share it."""
        return BYTES * self.rows(tokens) * self.model.hidden_size

    def residual(self, tokens: int) -> float:
        """Bytes of the residual stream on a rank elsewhere."""
        return self.whole_input(tokens) / self.token_shares

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """The blocks of layer number `layer` on one rank. Raises ValueError for an unknown one."""
        return blocks_of(self.model, layer, self.tensor_parallel)

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        return stages_of(self.model, self.layers_per_stage)

    def layer_parameters(self, layer: int = 0) -> Parameters:
        """Those of a layer on one rank."""
        dense, routed = layer_parameters(self.model, layer, self.tensor_parallel)
        return Parameters(dense, routed / self.expert_parallel)

    @property
    def embedding_parameters(self) -> float:
        return self.model.vocab_size * self.model.hidden_size / self.tensor_parallel

    @cached_property
    def parameters(self) -> list[Parameters]:
        """Those of each stage on one rank. The first stage holds the embedding, the last the projection to the
        vocabulary, and for prediction heads projections that join their inputs and another embedding."""
        layer_setup = self.layer_setup
        return of_stages(self.model, self.layers_per_stage, lambda stage: _stage_parameters(layer_setup, stage))

    def stage_parameters(self, stage: StageLayers) -> Parameters:
        """The parameters of one stage, as in `parameters`."""
        model = self.model
        dense = routed = 0.0
        for layer, count in stage.layers:
            of_layer = self.layer_parameters(layer)
            dense += count * of_layer.dense
            routed += count * of_layer.routed
        if stage.is_first:
            dense += model.learned_positions * model.hidden_size
        if stage.is_last:
            dense += model.prediction_depth * 2 * model.hidden_size**2 / self.tensor_parallel
        dense += self._embeddings_of(stage) * self.embedding_parameters
        return Parameters(dense, routed)

    def _embeddings_of(self, stage: StageLayers) -> int:
        """The number of matrices of a stage with a row for each word: the embedding, the projection to the vocabulary,
        and the embedding of prediction heads. Tied ones are one matrix."""
        if self.tied_embeddings:
            return 1 if stage.is_first or stage.is_last else 0
        number = 0
        if stage.is_first:
            number += 1
        if stage.is_last:
            number += 1
        if stage.is_last and self.model.prediction_depth and not stage.is_first:
            number += 1
        return number


@lru_cache(maxsize=1 << 16)
def _shared(setup: Any) -> Any:
    """One object for all equal set-ups: the first of them."""
    return setup


@lru_cache(maxsize=1 << 14)
def _stage_parameters(layer_setup: TrainingSetup, stage: StageLayers) -> Parameters:
    return layer_setup.stage_parameters(stage)


@lru_cache
def splits_backward(family: str) -> bool:
    """Whether a schedule of this family computes weight gradients apart."""
    return ScheduleChoice(family).splits_backwards
