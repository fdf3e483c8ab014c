"""Stand-ins for the cluster in a rehearsal: batches, documents, other ranks and the kernels of a GPU.

Tested in functional_tests/test_rehearsal.py by test_a_launch_on_eight_gpus.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import HostMemory, KernelChoice
from ..model.kernels import CudaFlash
from ..process.patches import Patch, PatchTable, wrapping
from ..runtime import Surroundings
from ..runtime.model_calls.calls import Calls
from ..runtime.segments.segmentation import MicroBatch
from ..runtime.segments.sequence_source import BOUNDS, SequenceSource
from ..runtime.step import Step
from .launch import document_lengths, has_transformer_engine


def fake_batches(args: Namespace) -> Iterator[dict[str, Tensor]]:
    """Endless batches of whole sequences: the length is read now, since `args.seq_length` later is that of a unit."""
    shape = (args.micro_batch_size, args.seq_length)
    masked = args.create_attention_mask_in_dataloader
    kinds = {"tokens": torch.long, "labels": torch.long, "loss_mask": torch.float, "position_ids": torch.long}

    def batch() -> dict[str, Tensor]:
        mask = {"attention_mask": torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)} if masked else {}
        return {name: torch.empty(shape, dtype=kind) for name, kind in kinds.items()} | mask

    return iter(batch, None)


def patches(args: Namespace, as_one_kernel: Callable) -> PatchTable:
    """The patches while a stage runs on fake tensors, with the kernels of a GPU if the launch is for GPUs;
    `as_one_kernel(function, ...)` calls a function that a GPU runs as one kernel."""
    if args.device == "cpu":
        return _FOR_FAKES
    fused = "megatron.core.fusions.fused_bias_"
    reason = "is not compiled here and makes temporaries"
    table = [*_FOR_FAKES, *_ON_A_GPU, *(wrapping(fused + name, as_one_kernel, reason) for name in _COMPILED)]
    if args.replaced_on_cpu["apply_rope_fusion"]:
        table.append(Patch(f"{_ROPE}._apply_rotary_pos_emb_bshd", _fused_positions, "keeps more than one kernel"))
    if has_transformer_engine(args):
        # Transformer Engine allocates the gathered input of a linear layer for the call.
        table.append(Patch(f"{_BUFFER}.get_tensor", _gathered_apart, "keeps a buffer for the input of a linear layer"))
    return tuple(table)


def surroundings(args: Namespace, new_buffer: Callable[[int], Tensor]) -> Surroundings:
    """The surroundings of a step on fake tensors, as on a GPU if the launch is for GPUs; `new_buffer(num_bytes)` makes
    a buffer on the host."""
    kernels_of = KernelChoice.of_config
    if args.device != "cpu":
        # Tensors without values are on no GPU; flash-attn, which may be missing, keeps as much as PyTorch's.
        kernels_of = partial(KernelChoice.of_config, is_on_gpu=lambda tensor: True, fused=CudaFlash)
    return Surroundings(
        read_calls=_documents_of_calls,
        source=_FakeSource(),
        host_memory=partial(HostMemory, copy=_no_copy, new_buffer=new_buffer),
        kernels_of=kernels_of,
    )


def _no_copy(pairs: list[tuple[Tensor, Tensor]], *_: Any) -> None:
    pairs.clear()


def _documents_of_calls(step: Step, calls: Calls) -> list[MicroBatch]:
    """Sequences of a few documents each, since tokens have no values."""
    calls.start_all()
    starts = tuple(accumulate(document_lengths(step.seq_length)[:-1], initial=0))
    number = step.batch_size
    return [MicroBatch(number, step.seq_length, (starts,) * number)] * step.num_microbatches


class _FakeSource(SequenceSource):
    """Sequences for units: in each replica one of the full length, and documents in place of the others."""

    def in_batch(self, *_: Any) -> list[Mapping[str, Tensor]]:
        return []

    def lengths(self, step: Step, *_: Any) -> list[list[int]]:
        others = document_lengths(step.seq_length) * (step.num_microbatches - 1)
        return [[step.seq_length, *others]] * step.groups.dp.size()

    def exchanged(
        self,
        step: Step,
        sample: Mapping[str, Tensor],
        read: Mapping[int, Mapping[str, Tensor]],
        owners: Mapping[int, int],
        lengths: Sequence[int],
        readers: Sequence[int],
    ) -> Mapping[int, Mapping[str, Tensor]]:
        types = {name: leaf.dtype for name, leaf in sample.items() if name not in BOUNDS}
        own = {}
        for number, owner in owners.items():
            if owner == step.groups.dp.rank():
                own[number] = {name: torch.empty(lengths[number], dtype=dtype) for name, dtype in types.items()}
        return own


def _fake_group(new_group: Callable, *args: Any, **options: Any) -> Any:
    return new_group(*args, **options | {"backend": "fake", "pg_options": None})


def _own_object_everywhere(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _own_counts_of_all(
    gather: Callable, input_: Tensor, group: dist.ProcessGroup, *args: Any, **options: Any
) -> Tensor:
    if input_.is_meta or group.size() == 1:
        return gather(input_, group, *args, **options)
    return input_.repeat(group.size(), *[1] * (input_.dim() - 1))


def _share_storage(discarded: Tensor, recomputed: Tensor) -> None:
    size = recomputed.untyped_storage().nbytes()
    recomputed.untyped_storage().resize_(0)
    discarded.untyped_storage().resize_(size)


def _one_after_the_other(p2p_op_list: list[dist.P2POp], *_: Any, **__: Any) -> list[Any]:
    return [message.op(message.tensor, message.peer, message.group) for message in p2p_op_list]


def _gathered_apart(_: Any, tensor_shape: tuple[int, ...], dtype: torch.dtype, *__: Any, **___: Any) -> Tensor:
    return torch.empty(tensor_shape, dtype=dtype, device=torch.cuda.current_device())


class _Kernel(torch.autograd.Function):
    """A kernel of a GPU; for the backward it keeps the weight, if it has one, and the tensors `kept`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *kept)
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(grad), of_weight, *[None] * len(kept)


def _fused_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Keeps its input and a number for each row, as in Transformer Engine; PyTorch's on a CPU keeps more."""
    statistics = input.new_empty(input.shape[:-1], dtype=torch.float32)
    return _Kernel.apply(input, weight, input.detach().contiguous(), statistics)


def _fused_positions(t: Tensor, freqs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Keeps the angles, which all layers share, as in Transformer Engine; Megatron keeps cosines and sines a layer."""
    return _Kernel.apply(t, None, freqs)


_TRAINING = "megatron.training.training"
_PARALLEL = "megatron.core.tensor_parallel"
_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_BUFFER = "megatron.core.utils.GlobalMemoryBuffer"
_OBJECTS = ("broadcast_object_list", "send_object_list", "recv_object_list")
_OTHERS = "reads what other ranks would send"

_FOR_FAKES = (
    wrapping("torch.distributed.new_group", _fake_group, "makes gloo or NCCL look for the other ranks"),
    Patch("torch.distributed.batch_isend_irecv", _one_after_the_other, "batches only tensors of a real device"),
    Patch("torch.distributed.all_gather_object", _own_object_everywhere, _OTHERS),
    *(Patch(f"torch.distributed.{name}", lambda *_, **__: None, _OTHERS) for name in _OBJECTS),
    Patch("torch.distributed.Work.is_completed", lambda *_, **__: True, "is False: no message is really sent"),
    Patch("megatron.core.optimizer.optimizer.get_grad_norm_fp32", lambda *_, **__: math.nan, "reads every gradient"),
    Patch(f"{_TRAINING}.logical_and_across_model_parallel_group", lambda input, *_, **__: input, _OTHERS),
    Patch(f"{_TRAINING}.set_jit_fusion_options", lambda *_, **__: None, "warms kernels up on tensors as in a step"),
    wrapping(f"{_PARALLEL}.mappings._gather_along_first_dim", _own_counts_of_all, f"{_OTHERS}: tokens of experts"),
    Patch(
        f"{_PARALLEL}.random._get_share_storage", lambda *_, **__: _share_storage, "compiles, and shares real memory"
    ),
)
_ON_A_GPU = (Patch("torch.nn.functional.rms_norm", _fused_norm, "keeps more than the kernels of a GPU do"),)
# Functions that Megatron compiles for a GPU.
_COMPILED = (
    "dropout.bias_dropout_add_fused_train",
    "gelu.bias_gelu",
    "gelu.bias_gelu_back",
    "swiglu.bias_swiglu",
    "swiglu.bias_swiglu_back",
    "swiglu.swiglu",
    "swiglu.swiglu_back",
    "swiglu.weighted_swiglu",
    "swiglu.weighted_swiglu_back",
)
