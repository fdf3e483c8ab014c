"""The launch, and what a rehearsal replaces of it, in words."""

from argparse import Namespace

from .packing import in_lengths

MIB = 2**20


def check(args: Namespace) -> None:
    """End the program if the launch is one that cannot be rehearsed."""
    if args.num_experts and args.moe_token_dispatcher_type == "flex":
        raise SystemExit(
            "error: --moe-token-dispatcher-type flex sends tokens by kernels that a rehearsal lacks; rehearse with "
            "--moe-token-dispatcher-type alltoall, which needs a little more memory"
        )
    if _is_packed(args) and _runs_megatrons_own_schedule(args):
        raise SystemExit(
            "error: Megatron's own schedules with packed documents cannot be rehearsed, since its local layers ignore "
            "where documents end; rehearse with --sequence-splits"
        )


def is_fused_on_gpu(args: Namespace) -> bool:
    """Whether Transformer Engine's layers, for which local ones stand here, compute attention on the cluster."""
    return (
        args.device != "cpu"
        and args.replaced_on_cpu["transformer_impl"] == "transformer_engine"
        and args.attention_backend.name != "local"
    )


def _runs_megatrons_own_schedule(args: Namespace) -> bool:
    return args.sequence_splits is args.pipeline_schedule is args.pipeline_schedule_file is None


def _is_packed(args: Namespace) -> bool:
    return bool(args.sft or args.reset_attention_mask or args.dataloader_inter_document_masking)


def in_words(args: Namespace) -> str:
    """The launch in one line."""
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size,
        "DP": args.data_parallel_size,
    }
    layout = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP"))
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return (
        f"{args.num_layers} layers of {args.hidden_size}, {args.seq_length} tokens, {num_microbatches} micro-batches "
        f"of {args.micro_batch_size}, {_schedule(args)}, {_recomputation(args)}, {_precision(args)}, on "
        f"{args.world_size} {'GPUs' if args.device != 'cpu' else 'CPU processes'} ({layout})"
    )


def _schedule(args: Namespace) -> str:
    chunks = args.virtual_pipeline_model_parallel_size
    with_chunks = f" of {chunks} chunks a rank" if chunks else ""
    if args.pipeline_schedule_file is not None:
        return f"the schedule of {args.pipeline_schedule_file}{with_chunks}"
    if _runs_megatrons_own_schedule(args):
        return f"Megatron's own {'interleaved ' if chunks else ''}1F1B{with_chunks}"
    segments = f" with {args.sequence_splits} segments" if (args.sequence_splits or 1) > 1 else ""
    return f"{args.pipeline_schedule or '1f1b'}{segments}{with_chunks}"


def _recomputation(args: Namespace) -> str:
    if args.recompute_granularity is None:
        return "no recomputation"
    return f"{args.recompute_granularity} recomputation"


def _precision(args: Namespace) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def stood_for(args: Namespace) -> tuple[str, ...]:
    """Sentences, without their full stops, on what a GPU would run and a rehearsal does not.

    Transformer Engine's layers (transformer_engine/pytorch, 2.20) keep the same for the backward as Megatron's local
    ones: the input of the norm and its output, the input of every linear layer, the input of the activation function.
    They differ in two things. Their fused rotary embedding keeps only the angles, which all layers share
    (attention/rope.py), where the local one keeps a cosine and a sine of its own for queries and for keys. And with
    gradient_accumulation_fusion their weight gradients are added to main_grad by the matrix product itself.
    """
    made_up = _made_up(args)
    if args.device == "cpu":
        return made_up
    replaced, notes = args.replaced_on_cpu, []
    if replaced["transformer_impl"] == "transformer_engine":
        notes.append("Transformer Engine's layers by Megatron's local ones, which keep as much for the backward")
        if args.moe_grouped_gemm:
            notes.append("grouped products of experts (--moe-grouped-gemm) by one expert after another")
    if args.position_embedding_type == "rope" and replaced["apply_rope_fusion"]:
        size = 2 if args.fp16 or args.bf16 else 4
        per_token = 4 * size * int(args.kv_channels * args.rotary_percent)
        notes.append(
            "the fused rotary embedding by the local one, whose cosines and sines for queries and keys are counted "
            f"here: {per_token * args.seq_length / MIB:.1f} MiB a layer and micro-batch that the GPU will not need"
        )
    if set(getattr(args, "hybrid_layer_pattern", None) or "") & {"M", "G"}:
        notes.append("the kernels of recurrent layers by plain PyTorch, which keeps more for the backward")
    if replaced["gradient_accumulation_fusion"]:
        notes.append("fused weight gradients by a temporary of the size of the weight, which the GPU will not need")
    return (*notes, *made_up)


def _made_up(args: Namespace) -> tuple[str, ...]:
    """What follows from values on the cluster."""
    notes = []
    if args.fp8 or args.fp4:
        name = "--fp8-format" if args.fp8 else "--fp4-format"
        notes.append(
            f"{name}, which is not modelled: everything is computed and counted in {_precision(args)}, without copies "
            "of weights in fewer bits or their scales"
        )
    if args.num_experts:
        notes.append(
            f"the router: each of the {args.num_experts} experts gets the same number of tokens. A rank whose experts "
            "get more needs more memory, in proportion"
        )
    if _is_packed(args):
        notes.append(f"the documents: each sequence holds {in_lengths(args.seq_length)} tokens")
    return tuple(notes)
