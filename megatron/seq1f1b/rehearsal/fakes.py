"""What stands in for the cluster in a rehearsal: batches, documents and functions; the launch in words."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Documents
from ..model.kernels import CudaFlash
from ..process.patches import Patch, PatchTable, wrapping
from ..runtime.step import Step

_SHARES = (0.4, 0.3, 0.2)  # of a sequence, for its documents; one more has the rest


def check(args: Namespace) -> None:
    """End the program if the launch is one that cannot be rehearsed."""
    if args.skip_train:
        raise SystemExit("error: --skip-train leaves no training step to rehearse; drop it")
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
    by_ring = sorted({*args.cp_comm_type} - {"a2a", "all_gather"})
    if args.context_parallel_size > 1 and by_ring:
        raise SystemExit(
            f"error: --cp-comm-type {by_ring[0]} cannot be rehearsed, since Transformer Engine's kernels "
            "send keys and values around the ring; rehearse with --cp-comm-type a2a, or all_gather if there are more "
            "context-parallel ranks than heads, which keep as much for the backward"
        )


def is_fused_on_gpu(args: Namespace) -> bool:
    """Whether Transformer Engine computes attention on the cluster, for which local layers stand here."""
    return _has_transformer_engine(args) and args.attention_backend.name != "local"


def _has_transformer_engine(args: Namespace) -> bool:
    return args.device != "cpu" and args.replaced_on_cpu["transformer_impl"] == "transformer_engine"


def _runs_megatrons_own_schedule(args: Namespace) -> bool:
    return args.sequence_splits is args.unit_tokens is args.pipeline_schedule is args.pipeline_schedule_file is None


def _is_packed(args: Namespace) -> bool:
    return bool(args.sft or args.reset_attention_mask or args.dataloader_inter_document_masking)


def launch_in_words(args: Namespace) -> str:
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
    chunks = args.virtual_pipeline_model_parallel_size
    if args.pipeline_schedule_file is not None:
        schedule = f"the schedule of {args.pipeline_schedule_file}"
    elif _runs_megatrons_own_schedule(args):
        schedule = f"Megatron's own {'interleaved ' if chunks else ''}1F1B"
    else:
        schedule = args.pipeline_schedule or "1f1b"
        if args.unit_tokens is not None:
            schedule += f" in units of at most {args.unit_tokens} tokens"
        elif (args.sequence_splits or 1) > 1:
            schedule += f" with {args.sequence_splits} segments"
    kept = " of all but attention" if args.recompute_keeps_attention else ""
    return (
        f"{args.num_layers} layers of {args.hidden_size}, {args.seq_length} tokens, {num_microbatches} micro-batches "
        f"of {args.micro_batch_size}, {schedule}{f' of {chunks} chunks a rank' if chunks else ''}, "
        f"{args.recompute_granularity or 'no'} recomputation{kept}, {_precision(args)}, on {args.world_size} "
        f"{'GPUs' if args.device != 'cpu' else 'CPU processes'} ({layout})"
    )


def _precision(args: Namespace) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def stood_for(args: Namespace) -> list[str]:
    """Sentences, without their full stops, on what a GPU would run and a rehearsal does not.

    By the public code of Transformer Engine (transformer_engine/pytorch, 2.20), its layers and Megatron's local ones
    keep the same for the backward, but for the rotary embedding and fused weight gradients.
    """
    notes, precision = [], _precision(args)
    if args.device != "cpu":
        replaced = args.replaced_on_cpu
        if _has_transformer_engine(args):
            notes.append("Transformer Engine's layers by Megatron's local ones, which keep as much for the backward")
            if args.moe_grouped_gemm:
                notes.append("grouped products of experts (--moe-grouped-gemm) by one expert after another")
        if replaced["moe_permute_fusion"]:
            notes.append("the fused permutation of tokens by plain indexing")
        if set(getattr(args, "hybrid_layer_pattern", None) or "") & {"M", "G"}:
            notes.append("the kernels of recurrent layers by plain PyTorch, which keeps more for the backward")
        if replaced["gradient_accumulation_fusion"]:
            notes.append("fused weight gradients by a temporary of the size of the weight, which the GPU will not need")
    if args.fp8 or args.fp4:
        notes.append(
            f"--{'fp8' if args.fp8 else 'fp4'}-format, which is not modelled: everything is computed and counted in "
            f"{precision}, without copies of weights in fewer bits or their scales"
        )
    if args.num_experts:
        notes.append(
            f"the router: each of the {args.num_experts} experts gets the same number of tokens. A rank whose experts "
            "get more needs more memory, in proportion"
        )
    if _is_packed(args):
        *lengths, last = map(str, _lengths(args.seq_length))
        but = "" if args.unit_tokens is None else ", the first of a step but one"
        notes.append(f"the documents: each sequence holds documents of {', '.join(lengths)} and {last} tokens{but}")
    return notes


def fake_batches(args: Namespace) -> Iterator[dict[str, Tensor]]:
    """Endless batches, each of `micro_batch_size` sequences of `seq_length` tokens.

    The length is read now: while a segment runs, `args.seq_length` is that of the segment.
    """
    shape, masked = (args.micro_batch_size, args.seq_length), args.create_attention_mask_in_dataloader
    kinds = {"tokens": torch.long, "labels": torch.long, "loss_mask": torch.float, "position_ids": torch.long}

    def batch() -> dict[str, Tensor]:
        mask = {"attention_mask": torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)} if masked else {}
        return {name: torch.empty(shape, dtype=kind) for name, kind in kinds.items()} | mask

    return iter(batch, None)


def _lengths(sequence_length: int) -> list[int]:
    lengths = [max(1, int(share * sequence_length)) for share in _SHARES]
    return [*lengths, sequence_length - sum(lengths)]


def _documents_of_step(step: Step, *_: Any) -> list[Documents]:
    starts = tuple(accumulate(_lengths(step.seq_length)[:-1], initial=0))
    return [(starts,) * step.micro_batch_size] * step.num_microbatches


def _lengths_of_step(step: Step, *_: Any) -> list[list[int]]:
    """For units: in each replica one sequence as long as there can be, and the documents of the others."""
    return [[step.seq_length, *_lengths(step.seq_length) * (step.num_microbatches - 1)]] * step.groups.dp.size()


def _sequences_of_step(
    step: Step, entries: Any, read: Any, owners: Mapping[int, int], lengths: Sequence[int], *_: Any
) -> dict[int, dict[str, Tensor]]:
    own = (number for number, owner in owners.items() if owner == step.groups.dp.rank())
    return {
        number: {name: torch.empty(lengths[number], dtype=dtype) for name, dtype in entries.dtypes.items()}
        for number in own
    }


def patches(args: Namespace, as_one_kernel: Callable) -> PatchTable:
    """What is bound while a stage runs on fake tensors; includes the kernels of a GPU if the launch is for GPUs.

    `as_one_kernel(function, ...)` calls a function that a GPU runs as one kernel.
    """
    if args.device == "cpu":
        return _FOR_FAKES
    fused = _AS_WITH_FUSED_POSITIONS if args.replaced_on_cpu["apply_rope_fusion"] else ()
    compiled = tuple(
        wrapping(name, as_one_kernel, "is not compiled here, and leaves temporaries") for name in _COMPILED
    )
    return _FOR_FAKES + _AS_ON_A_GPU + compiled + fused + (_AS_WITH_TE if _has_transformer_engine(args) else ())


def _fake_group(new_group: Callable, *args: Any, **options: Any) -> Any:
    return new_group(*args, **options | {"backend": "fake", "pg_options": None})


def _own_object_everywhere(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _own_counts_of_all(gather: Callable, own: Tensor, group: dist.ProcessGroup, *args: Any, **options: Any) -> Tensor:
    if own.is_meta or group.size() == 1:
        return gather(own, group, *args, **options)
    return own.repeat(group.size(), *[1] * (own.dim() - 1))


def _share_storage(discarded: Tensor, recomputed: Tensor) -> None:
    size = recomputed.untyped_storage().nbytes()
    recomputed.untyped_storage().resize_(0)
    discarded.untyped_storage().resize_(size)


class _FusedNorm(torch.autograd.Function):
    """An RMS norm that keeps its input, in one piece, and a number for each row, like Transformer Engine's kernel.

    Away from a GPU, PyTorch computes it step by step and keeps the input twice in fp32.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows.contiguous(), weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        return torch.empty_like(rows), None if weight is None else torch.empty_like(weight)


def _fused_norm(rows: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(rows, weight)


class _FusedPositions(torch.autograd.Function):
    """Rotary positions that keep the angles, which all layers share, like the kernel of Transformer Engine.

    Megatron's own code keeps cosines and sines for each layer.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grad), None


def _fused_positions(rows: Tensor, angles: Tensor, **_: Any) -> Tensor:
    return _FusedPositions.apply(rows, angles)


def _one_after_the_other(operations: list[dist.P2POp]) -> list[Any]:
    return [each.op(each.tensor, each.peer, each.group) for each in operations]


def _gathered_apart(_: Any, shape: tuple[int, ...], dtype: torch.dtype, *__: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())


def _nothing(*args: Any, **options: Any) -> None:
    pass


def _always(*args: Any) -> bool:
    return True


_SEGMENTATION, _REPACKING = "megatron.seq1f1b.runtime.segmentation", "megatron.seq1f1b.runtime.repacking"
_CHOICE = "megatron.seq1f1b.model.kernels.kernel_choice.KernelChoice"
_TRAINING, _PARALLEL = "megatron.training.training", "megatron.core.tensor_parallel"
_OBJECTS = ("broadcast_object_list", "send_object_list", "recv_object_list")

_FOR_FAKES = (
    wrapping("torch.distributed.new_group", _fake_group, "makes gloo or NCCL look for the other ranks"),
    Patch("torch.distributed.batch_isend_irecv", _one_after_the_other, "looks for what batches tensors of a device"),
    Patch("torch.distributed.all_gather_object", _own_object_everywhere, "reads sizes that others would send"),
    *(Patch(f"torch.distributed.{name}", _nothing, "sends and reads sizes") for name in _OBJECTS),
    Patch("megatron.core.optimizer.optimizer.get_grad_norm_fp32", lambda *_, **__: math.nan, "reads every gradient"),
    Patch(
        f"{_TRAINING}.logical_and_across_model_parallel_group",
        lambda own, *_, **__: own,
        "reads what other ranks would send",
    ),
    Patch(f"{_TRAINING}.set_jit_fusion_options", _nothing, "warms kernels up on real tensors as large as a step's"),
    wrapping(
        f"{_PARALLEL}.mappings._gather_along_first_dim",
        _own_counts_of_all,
        "gathers into a tensor without values how many tokens each expert gets",
    ),
    Patch(
        f"{_PARALLEL}.random._get_share_storage",
        lambda: _share_storage,
        "compiles what shares memory of tensors, which here have none",
    ),
    Patch("torch.distributed.Work.is_completed", _always, "tests work that nobody does"),
    Patch(f"{_SEGMENTATION}.documents_of_step", _documents_of_step, "looks for documents in tokens"),
    Patch(f"{_REPACKING}.Repacking._sequences", lambda *_: [], "looks for documents in tokens"),
    Patch(f"{_REPACKING}._of_all_replicas", _lengths_of_step, "lengths are those of documents in tokens"),
    Patch(f"{_REPACKING}._exchanged", _sequences_of_step, "moves values"),
    Patch("megatron.seq1f1b.model.host_copies._copy", lambda pairs, *_: pairs.clear(), "copies values"),
)

_AS_ON_A_GPU = (
    Patch(f"{_CHOICE}.is_on_gpu", _always, "tensors without values are on no GPU"),
    Patch(f"{_CHOICE}._fused", lambda _, rule, *__: CudaFlash(rule), "flash-attn, which may be missing, keeps as much"),
    Patch("torch.nn.functional.rms_norm", _fused_norm, "keeps more than the kernels of a GPU do"),
)

_AS_WITH_FUSED_POSITIONS = (
    Patch(
        "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd",
        _fused_positions,
        "keeps cosines and sines for each layer",
    ),
)

_AS_WITH_TE = (
    Patch(
        "megatron.core.utils.GlobalMemoryBuffer.get_tensor",
        _gathered_apart,
        "keeps a buffer for the gathered input of a linear layer, which Transformer Engine allocates for the call",
    ),
)

# What Megatron compiles for a GPU.
_COMPILED = tuple(
    f"megatron.core.fusions.fused_bias_{name}"
    for name in (
        *("gelu.bias_gelu", "gelu.bias_gelu_back"),
        *(f"swiglu.{of}swiglu{back}" for of in ("", "bias_", "weighted_") for back in ("", "_back")),
        "dropout.bias_dropout_add_fused_train",
    )
)
