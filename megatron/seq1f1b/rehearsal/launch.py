"""Sentences about the launch of a rehearsal: why it cannot be rehearsed, its size and schedule, and what is replaced.

Tested in rehearsal/test_command.py.
"""

from argparse import Namespace

# Ways of context parallelism (--cp-comm-type) that run without a GPU. The others pass keys on in a ring, by kernels of
# Transformer Engine.
WITHOUT_A_RING = ("a2a", "all_gather")

_RECURRENT = frozenset("MG")  # Mamba and gated delta nets, in --hybrid-layer-pattern
_DOCUMENT_SHARES = (0.4, 0.3, 0.2)  # of a packed sequence; one more document has the rest


def check_launch(args: Namespace) -> None:
    """End the program if the launch cannot be rehearsed."""
    by_ring = sorted({*args.cp_comm_type} - {*WITHOUT_A_RING})
    if args.num_experts and args.moe_token_dispatcher_type == "flex":
        raise SystemExit(
            "error: --moe-token-dispatcher-type flex sends tokens by kernels that a rehearsal lacks; rehearse with "
            "alltoall, which needs a little more memory"
        )
    if _is_packed(args) and _runs_megatrons_own_schedule(args):
        raise SystemExit(
            "error: Megatron's own schedules with packed documents cannot be rehearsed, since its local layers ignore "
            "where documents end; rehearse with --sequence-splits"
        )
    if args.use_megatron_fsdp:
        raise SystemExit(
            "error: --use-megatron-fsdp cannot be rehearsed, since its buffers are made on a GPU; rehearse with "
            "--use-distributed-optimizer alone, which needs more memory"
        )
    if args.context_parallel_size > 1 and by_ring:
        raise SystemExit(
            f"error: --cp-comm-type {by_ring[0]} cannot be rehearsed, since it is a kernel of Transformer Engine; "
            "rehearse with a2a, or all_gather if there are more ranks than heads, which keep as much for the backward"
        )


def has_transformer_engine(args: Namespace) -> bool:
    """Whether Transformer Engine's layers run on the cluster; local layers replace them here."""
    return args.device != "cpu" and args.replaced_on_cpu["transformer_impl"] == "transformer_engine"


def document_lengths(sequence_length: int) -> list[int]:
    """The tokens of each document of a packed sequence."""
    lengths = [max(1, int(share * sequence_length)) for share in _DOCUMENT_SHARES]
    return [*lengths, sequence_length - sum(lengths)]


def in_words(args: Namespace) -> str:
    """The launch in one line."""
    layout = [f"TP {args.tensor_model_parallel_size}", f"PP {args.pipeline_model_parallel_size}"]
    if args.context_parallel_size > 1:
        layout.append(f"CP {args.context_parallel_size}")
    if args.expert_model_parallel_size > 1:
        layout.append(f"EP {args.expert_model_parallel_size}")
    num_microbatches = _num_microbatches(args)
    kept = " of all but attention" if args.recompute_keeps_attention else ""
    devices = "CPU processes" if args.device == "cpu" else "GPUs"
    return (
        f"{args.num_layers} layers of {args.hidden_size}, {args.seq_length} tokens, {num_microbatches} micro-batches "
        f"of {args.micro_batch_size}, {_schedule(args)}, {args.recompute_granularity or 'no'} recomputation{kept}, "
        f"{_precision(args)}, on {args.world_size} {devices} "
        f"({' × '.join(layout)} × DP {args.data_parallel_size})"
    )


def hint_of_smaller_batch(args: Namespace) -> str | None:
    """A sentence that names the smallest batch with the same memory, whose rehearsal takes less time; None if the batch
    of the launch is no larger.

    By 1F1B and ZB-H1 no rank ever holds more units than with twice as many micro-batches as there are pipeline ranks.
    """
    num_microbatches = _num_microbatches(args)
    enough = 2 * args.pipeline_model_parallel_size
    holds_few = args.pipeline_schedule in (None, "1f1b", "zb-h1") and args.pipeline_schedule_file is None
    if num_microbatches <= enough or not holds_few or args.unit_tokens is not None:
        return None
    batch = enough * args.micro_batch_size * args.data_parallel_size
    return (
        f"Rehearsing {num_microbatches} micro-batches. With --global-batch-size {batch}, which makes {enough}, it "
        "takes less time and finds the same memory."
    )


def _num_microbatches(args: Namespace) -> int:
    return args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)


def _schedule(args: Namespace) -> str:
    name = str(args.pipeline_schedule or args.pipeline_schedule_file or "1f1b")
    if _runs_megatrons_own_schedule(args):
        name = "Megatron's own 1F1B"
    elif args.unit_tokens is not None:
        name += f" in units of at most {args.unit_tokens} tokens"
    elif (args.sequence_splits or 1) > 1:
        name += f" with {args.sequence_splits} segments"
    chunks = args.virtual_pipeline_model_parallel_size
    return name + (f" of {chunks} chunks a rank" if chunks else "")


def replacements(args: Namespace) -> list[str]:
    """What a rehearsal replaces, and by what: sentences without their full stops."""
    notes = [] if args.device == "cpu" else _replaced_gpu_parts(args)
    if args.fp8 or args.fp4:
        flag = "--fp8-format" if args.fp8 else "--fp4-format"
        notes.append(
            f"{flag}, which is not modelled: everything is computed and counted in {_precision(args)}, without copies "
            "of weights in fewer bits or their scales"
        )
    if args.num_experts:
        notes.append(
            f"the router: each of the {args.num_experts} experts gets the same number of tokens. A rank needs more "
            "memory, in proportion, if its experts get more"
        )
    if _is_packed(args):
        *lengths, last = map(str, document_lengths(args.seq_length))
        exception = "" if args.unit_tokens is None else "; the first of a step is one document"
        notes.append(
            f"the documents: each sequence holds documents of {', '.join(lengths)} and {last} tokens{exception}"
        )
    return notes


def _replaced_gpu_parts(args: Namespace) -> list[str]:
    """What a launch runs on GPUs only."""
    notes = []
    if has_transformer_engine(args):
        notes.append("Transformer Engine's layers by Megatron's local ones, which keep as much")
    if _RECURRENT.intersection(getattr(args, "hybrid_layer_pattern", None) or ""):
        notes.append("the kernels of recurrent layers by plain PyTorch, which keeps more for the backward")
    if args.replaced_on_cpu["gradient_accumulation_fusion"]:
        notes.append("fused weight gradients by a temporary as large as the weight, which no GPU needs")
    if args.replaced_on_cpu["cuda_graph_impl"] != "none":
        notes.append(
            "CUDA graphs by what they replay, which keeps as much; their buffers stay allocated, and are not counted"
        )
    return notes


def _precision(args: Namespace) -> str:
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else "fp32"


def _is_packed(args: Namespace) -> bool:
    return bool(args.sft or args.reset_attention_mask or args.dataloader_inter_document_masking)


def _runs_megatrons_own_schedule(args: Namespace) -> bool:
    ours = (args.sequence_splits, args.unit_tokens, args.pipeline_schedule, args.pipeline_schedule_file)
    return all(flag is None for flag in ours)
