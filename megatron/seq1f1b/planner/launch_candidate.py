"""The configuration that the flags of a launch ask for, to be predicted beside the plans of the search.

Tested in commands/test_launch_flags.py.
"""

import argparse
from dataclasses import replace
from math import prod

from ..arguments.flags import AUTO
from ..arguments.layer_layout import stages_of_layout
from ..arguments.megatron_run import hybrid_stages, layers_per_stage
from ..costs.simulator import check_size
from ..costs.training_setup import Fsdp, Moves, TrainingSetup, choices_of
from ..process.flag_names import flag_of
from ..schedule import Shape
from .fitting import fitted
from .space import Candidate, ParallelSizes, Question, expert_sizes, lengths_of

# Flags of schedules and cuts that a plan does not predict.
NOT_PREDICTED = ("pipeline_schedule_file", "sequence_split_file", "sequence_split_profile", "pipeline_placement")
_PREDICTED = ("balanced", "even", "uniform_comp")  # ways to cut
_MOST_ACTIONS = 1_000_000


def candidate_of_launch(launch: argparse.Namespace, question: Question) -> Candidate | None:
    """The configuration of the launch; None if it names no parallel sizes. Raises ValueError for flags that have no
    prediction, and for sizes that do not divide."""
    for name in NOT_PREDICTED:
        if vars(launch)[name] is not None:
            raise ValueError(f"{flag_of(name)} is chosen by the plan; drop it")
    if "/" in (launch.hybrid_layer_pattern or ""):
        raise ValueError("--hybrid-layer-pattern with / has prediction heads, which are not planned; drop them")
    if launch.tensor_model_parallel_size is None and launch.pipeline_model_parallel_size is None:
        return None
    candidate = _cut(launch, question, _whole(launch, question))
    return replace(candidate, setup=_with_moves(launch, question, candidate.setup))


def _cut(launch: argparse.Namespace, question: Question, setup: TrainingSetup) -> Candidate:
    """The set-up in the segments of the launch. Raises ValueError if there are too many, or a strategy has no
    prediction."""
    strategy = launch.sequence_split_strategy
    segments = launch.sequence_splits or 1
    if strategy not in _PREDICTED:
        raise ValueError(f"--sequence-split-strategy {strategy} is not predicted; take {', '.join(_PREDICTED)}")
    check_size(Shape(setup.placement, setup.num_microbatches, segments), _MOST_ACTIONS)
    if segments == 1:
        return Candidate(setup, "even")
    lengths = lengths_of(setup, strategy, segments)
    if lengths is None:
        raise ValueError(f"--sequence-splits {segments} are too many for --seq-length {question.sequence_length}")
    return Candidate(replace(setup, segments=lengths, cp_comm_type=None), strategy)


def _with_moves(launch: argparse.Namespace, question: Question, setup: TrainingSetup) -> TrainingSetup:
    """The set-up with the activations on the host that the launch moves there."""
    if launch.fine_grained_activation_offloading:
        return replace(setup, offloads=launch.activation_offload_fraction, moves=Moves.MODULES)
    if launch.cpu_offloading_num_layers:
        share = launch.cpu_offloading_num_layers / setup.model.num_layers
        return replace(setup, offloads=share, moves=Moves.LAYERS)
    setup = replace(setup, layers_leaving=launch.offload_layers_leaving)
    if launch.offload_activations != AUTO:
        return replace(setup, offloads=launch.offload_activations)
    return fitted(setup, question.budget, Moves.UNITS) or replace(setup, offloads=1.0)


def _whole(launch: argparse.Namespace, question: Question) -> TrainingSetup:
    """The launch on whole sequences, with nothing on the host. Raises ValueError for sizes that do not divide."""
    tensor = launch.tensor_model_parallel_size or 1
    pipeline = launch.pipeline_model_parallel_size or 1
    context = launch.context_parallel_size or 1
    micro_batch = launch.micro_batch_size or 1
    data, rest = divmod(question.num_devices, tensor * pipeline * context)
    if rest or question.global_batch_size % (max(data, 1) * micro_batch):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline} and "
            f"--micro-batch-size {micro_batch} do not divide --gpus {question.num_devices} and --global-batch-size "
            f"{question.global_batch_size}; drop them to have them chosen"
        )
    expert = launch.expert_model_parallel_size or 1
    cut_experts = 1 if question.model.experts is None else launch.expert_tensor_parallel_size or tensor
    ranks, not_cut = divmod(tensor * context * data, cut_experts)
    if not_cut or (expert > 1 and expert not in expert_sizes(question.model, ranks)):
        sizes = f"--expert-model-parallel-size {expert} and --expert-tensor-parallel-size {cut_experts}"
        raise ValueError(f"{sizes} do not divide the experts and the ranks of a stage; drop them to have them chosen")
    chunks, layers = _chunks_and_layers(launch, pipeline, question.model.num_layers)
    settings = vars(launch) | {"num_experts": question.model.experts}
    return question.setup(
        ParallelSizes(tensor, context, pipeline, data),
        chunks,
        micro_batch,
        family=launch.pipeline_schedule or "1f1b",
        cp_comm_type=_cp_comm_type(launch, context),
        overlaps_data_parallel=launch.overlap_grad_reduce,
        keeps_logits=launch.keep_logits or not (launch.pipeline_schedule or launch.sequence_splits),
        hides_experts=launch.overlap_moe_expert_parallel_comm,
        fsdp=_fsdp(launch),
        **choices_of(settings, layers, launch.recompute_keeps_attention),
    )


def _cp_comm_type(launch: argparse.Namespace, context: int) -> str | None:
    """How the ranks of context parallelism exchange whole sequences; None for the fastest way, which layers that differ
    take. Raises ValueError for wrong sizes of a hierarchy."""
    kinds = {*launch.cp_comm_type}
    if context == 1 or len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind != "a2a+p2p":
        return str(kind)
    sizes = launch.hierarchical_context_parallel_sizes
    if len(sizes) != 2 or prod(sizes) != context:
        need = f"needs --hierarchical-context-parallel-sizes A B with the product {context}"
        raise ValueError(f"--cp-comm-type a2a+p2p {need}")
    neighbours, groups = sizes
    return f"a2a+p2p {neighbours} {groups}"


def _fsdp(launch: argparse.Namespace) -> Fsdp:
    """Raises ValueError for a strategy that has no costs."""
    if not launch.use_megatron_fsdp:
        return Fsdp.OFF
    strategy = launch.data_parallel_sharding_strategy or Fsdp.PARAMETERS  # as in Megatron
    strategies = [fsdp for fsdp in Fsdp if fsdp is not Fsdp.OFF]
    if strategy not in strategies:
        raise ValueError(
            f"--data-parallel-sharding-strategy {strategy} has no costs with --use-megatron-fsdp; "
            f"give one of {', '.join(strategies)}"
        )
    return Fsdp(strategy)


def _chunks_and_layers(launch: argparse.Namespace, ranks: int, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Raises ValueError for stages that do not make the layers of the model."""
    layout = launch.pipeline_model_parallel_layout
    chunks = launch.num_virtual_stages_per_pipeline_rank or 1
    stages = hybrid_stages(vars(launch)) if layout is None else stages_of_layout(layout)
    if layout is not None or len(stages) > 1:
        chunks = max(1, len(stages) // ranks)
    elif launch.num_layers_per_virtual_pipeline_stage is not None:
        chunks = max(1, num_layers // ranks // launch.num_layers_per_virtual_pipeline_stage)
    sizes = {"pipeline_model_parallel_size": ranks, "virtual_pipeline_model_parallel_size": chunks}
    layers = layers_per_stage(vars(launch) | sizes | {"num_layers": num_layers})
    if len(layers) != ranks * chunks or sum(layers) != num_layers or min(layers) < 0:
        stages_of_flags = f"{list(layers)} layers on {ranks * chunks} pipeline stages, which do not make {num_layers}"
        if layout is not None:
            raise ValueError(
                f"--pipeline-model-parallel-layout {layout} puts {stages_of_flags}; drop it to have the layers spread"
            )
        raise ValueError(f"these flags put {stages_of_flags}; drop them to have the layers spread")
    return chunks, layers
