"""The flags of a launch of Megatron, read without Megatron: the model, what a planner decides, and what it leaves."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..partition import DEFAULT_STRATEGY, STRATEGIES
from ..planning.costs import Experts, ModelShape
from ..planning.costs.training_setup import TrainingSetup, even_layers
from ..planning.planner import Candidate, Question
from ..planning.planner.space import cut, expert_sizes
from ..schedule import FAMILY_NAMES, Placement
from .parsing import MOST_LAYERS, Parser, count, count_up_to

# Refused: the formulas of time and memory do not cover them.
_NOT_PREDICTED = ("--multi-latent-attention", "--hybrid-layer-pattern", "--window-size", "--mtp-num-layers")
# Predicted as if they were absent, which the output says.
_IN_16_BIT = ("--fp8-format", "--fp4-format")
_MOST_ACTIONS = 1_000_000


def add_model_flags(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """The sizes of a GPT, for commands that predict or measure one."""
    group = parser.add_argument_group("model, as in Megatron")
    group.add_argument("--num-layers", type=count_up_to(MOST_LAYERS), default=defaults["num_layers"])
    group.add_argument("--hidden-size", type=count, default=defaults["hidden_size"])
    group.add_argument("--num-attention-heads", type=count, default=defaults["num_attention_heads"])
    group.add_argument("--ffn-hidden-size", type=count, help="default: 4 times the hidden size, 8/3 with --swiglu")
    group.add_argument("--kv-channels", type=count, help="size of a head; default: hidden size / heads")
    group.add_argument("--num-query-groups", type=count, help="number of KV heads; default: as many as heads")
    group.add_argument("--swiglu", action="store_true", help="a gated feed-forward block of three matrices")
    group.add_argument("--vocab-size", type=count, default=defaults["vocab_size"], help="padded")


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The sizes that the flags give, with Megatron's defaults; raises ValueError for sizes that do not divide."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {args.num_attention_heads}; "
            "change one, or give --kv-channels"
        )
    if args.num_query_groups is not None and args.num_attention_heads % args.num_query_groups:
        raise ValueError(
            f"--num-attention-heads {args.num_attention_heads} is not a multiple of --num-query-groups "
            f"{args.num_query_groups}; change one"
        )
    ffn_hidden_size = args.ffn_hidden_size
    if ffn_hidden_size is None:
        ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_heads=args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=args.vocab_size,
        num_kv_heads=args.num_query_groups,
        is_gated=args.swiglu,
    )


def read_launch(words: Sequence[str]) -> argparse.Namespace:
    """Read the flags of a launch. Unknown flags are passed over; a flag that is not given is None."""
    return _parser(_add_model, _add_decided).parse_known_args(words)[0]


def undecided(words: Sequence[str]) -> list[str]:
    """The flags of a launch without those that a planner decides, each with its values."""
    return _with_values(_parser(_add_decided).parse_known_args(words)[1])


def unread(words: Sequence[str]) -> list[str]:
    """The flags of a launch that change nothing in a prediction, each with its values."""
    return _with_values(_parser(_add_model, _add_decided).parse_known_args(words)[1])


def model_sizes_in(words: Sequence[str]) -> list[str]:
    """The names of the flags of a launch that give the sizes of the model."""
    names = _parser(_add_model)._option_string_actions
    return [name for word in words if (name := word.partition("=")[0]) in names]


def not_modelled(words: Sequence[str]) -> list[str]:
    """The names of the flags of a launch that change time or memory, but no prediction."""
    return [name for word in words if (name := word.partition("=")[0]) in _IN_16_BIT]


def _parser(*added: Callable[[argparse.ArgumentParser], None]) -> Parser:
    parser = Parser(None, allow_abbrev=False, add_help=False)
    for add in added:
        add(parser)
    return parser


def _with_values(words: Sequence[str]) -> list[str]:
    flags: list[str] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags


def model_of(launch: argparse.Namespace) -> ModelShape:
    """The model of a launch. Raises ValueError if a size is missing, or sizes do not go together."""
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if getattr(launch, name) is None]
    if missing:
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: give the sizes of the model, or --model")
    for flag in _NOT_PREDICTED:
        if getattr(launch, flag[2:].replace("-", "_")):
            raise ValueError(f"{flag} has no cost in the planner; drop it here, or rehearse the launch (--dry-run)")
    if not launch.group_query_attention:
        launch.num_query_groups = None
    model = model_shape(launch)
    if launch.num_experts is None:
        return model
    if launch.moe_router_topk > launch.num_experts:
        raise ValueError(f"--moe-router-topk {launch.moe_router_topk} is more than --num-experts {launch.num_experts}")
    experts = Experts(
        total=launch.num_experts,
        active=launch.moe_router_topk,
        ffn_hidden_size=launch.moe_ffn_hidden_size or model.ffn_hidden_size,
        shared_ffn_hidden_size=launch.moe_shared_expert_intermediate_size or 0,
    )
    layers = range(model.num_layers)
    frequency = launch.moe_layer_freq
    sparse = [not layer % frequency for layer in layers] if isinstance(frequency, int) else frequency
    if len(sparse) != model.num_layers:
        raise ValueError(f"--moe-layer-freq has {len(sparse)} entries, --num-layers is {model.num_layers}")
    return replace(model, experts=experts, expert_layers=tuple(layer for layer in layers if sparse[layer]))


def as_given(launch: argparse.Namespace, question: Question) -> Candidate | None:
    """The configuration of the launch itself; None if it names no parallel sizes. Raises ValueError for wrong ones."""
    tensor, pipeline = launch.tensor_model_parallel_size, launch.pipeline_model_parallel_size
    if tensor is None and pipeline is None:
        return None
    tensor, pipeline, context = tensor or 1, pipeline or 1, launch.context_parallel_size or 1
    micro_batch = launch.micro_batch_size or 1
    data, rest = divmod(question.num_devices, tensor * pipeline * context)
    microbatches, left = divmod(question.global_batch_size, max(data, 1) * micro_batch)
    expert = launch.expert_model_parallel_size or 1
    if expert > 1 and (
        question.model.experts is None or expert not in expert_sizes(question.model, tensor * context * data)
    ):
        raise ValueError(
            f"--expert-model-parallel-size {expert} does not divide the experts and the {tensor * context * data} "
            "ranks of a pipeline stage; drop it to have it chosen"
        )
    if rest or left:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline} and "
            f"--micro-batch-size {micro_batch} do not divide --gpus {question.num_devices} and --global-batch-size "
            f"{question.global_batch_size}; drop them to have them chosen"
        )
    placement = Placement(pipeline, _chunks(launch, pipeline, question.model.num_layers))
    setup = TrainingSetup(
        model=question.model,
        sequence_length=question.sequence_length,
        num_microbatches=microbatches,
        micro_batch_size=micro_batch,
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=expert,
        data_parallel=data,
        placement=placement,
        family=launch.pipeline_schedule or "1f1b",
        layers_per_stage=_layers(launch, placement, question.model.num_layers),
        sequence_parallel=launch.sequence_parallel,
        recompute=launch.recompute_granularity or "none",
        distributed_optimizer=launch.use_distributed_optimizer,
        overlaps_data_parallel=launch.overlap_grad_reduce,
    )
    strategy, segments = launch.sequence_split_strategy, launch.sequence_splits or 1
    if (actions := 2 * placement.num_stages * microbatches * segments) > _MOST_ACTIONS:
        raise ValueError(
            f"these sizes make {actions:,} actions, the most are {_MOST_ACTIONS:,} here; take a smaller "
            "--global-batch-size or fewer --sequence-splits"
        )
    if segments == 1:
        return Candidate(setup)
    lengths = cut(setup, strategy, segments)
    if lengths is None:
        raise ValueError(f"--sequence-splits {segments} are too many for --seq-length {question.sequence_length}")
    return Candidate(replace(setup, segments=lengths), strategy)


def _chunks(launch: argparse.Namespace, pipeline: int, num_layers: int) -> int:
    if launch.num_layers_per_virtual_pipeline_stage is not None:
        return max(1, num_layers // pipeline // launch.num_layers_per_virtual_pipeline_stage)
    return launch.num_virtual_stages_per_pipeline_rank or 1


def _layers(launch: argparse.Namespace, placement: Placement, num_layers: int) -> tuple[int, ...]:
    """Empty for an even spread, as a TrainingSetup has it. Raises ValueError where a stage would have none."""
    stages = placement.num_stages
    if stages > num_layers:
        raise ValueError(f"--num-layers {num_layers} leaves some of the {stages} pipeline stages without a layer")
    first, last = launch.decoder_first_pipeline_num_layers, launch.decoder_last_pipeline_num_layers
    if placement.num_chunks > 1 or first is last is None:
        return ()
    before, after = [] if first is None else [first], [] if last is None else [last]
    middle = stages - len(before) - len(after)
    rest = num_layers - sum(before) - sum(after)
    if rest < middle or (middle <= 0 and rest):
        flags = [f"--decoder-{end}-pipeline-num-layers {n}" for end, n in (("first", first), ("last", last)) if n]
        raise ValueError(
            f"{' and '.join(flags)} of --num-layers {num_layers} do not make {stages} stages; drop them to have the "
            "layers spread"
        )
    return (*before, *(even_layers(rest, middle) if middle else ()), *after)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, num_layers=None, hidden_size=None, num_attention_heads=None, vocab_size=51200)
    for name in ("num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "mtp-num-layers"):
        parser.add_argument(f"--{name}", type=count)
    parser.add_argument("--moe-router-topk", type=count, default=2)
    parser.add_argument("--moe-layer-freq", type=_layer_frequency, default=1)
    for name in ("hybrid-layer-pattern", "window-size"):
        parser.add_argument(f"--{name}")
    for name in ("group-query-attention", "multi-latent-attention"):
        parser.add_argument(f"--{name}", action="store_true")


def _layer_frequency(text: str) -> int | list[int]:
    """Every so many layers, or a list of 0 and 1 as Megatron's parser takes it: [0,1,1] or [0]*1+[1]*2."""
    if text.isdigit() and int(text):
        return int(text)
    found: list[int] = []
    for part in text.strip().removeprefix("(").removesuffix(")").split("+"):
        entries, _, times = part.strip().partition("*")
        try:
            numbers = [int(number) for number in entries.strip().removeprefix("[").removesuffix("]").split(",")]
            found += numbers * min(int(times or 1), MOST_LAYERS + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*1+[1]*47") from None
    if len(found) > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {MOST_LAYERS} layers")
    return found


def _add_decided(parser: argparse.ArgumentParser) -> None:
    for name in (
        "seq-length",
        "global-batch-size",
        "micro-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "sequence-splits",
        "recompute-num-layers",
    ):
        parser.add_argument(f"--{name}", type=count)
    parser.add_argument("--pipeline-schedule", choices=sorted(FAMILY_NAMES))
    parser.add_argument("--sequence-split-strategy", choices=sorted(STRATEGIES), default=DEFAULT_STRATEGY)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    for name in ("recompute-method", "cp-comm-type"):
        parser.add_argument(f"--{name}")
    for name in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"):
        parser.add_argument(f"--{name}", action="store_true")
