"""What `get_forward_backward_func` returns: runs any schedule, for training and evaluation."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection, get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from ..model import (
    Documents,
    SegmentContext,
    WeightGradientStore,
    add_up_all_weight_gradients,
    attach,
    collectives_watched,
    weight_gradients_left_in,
)
from ..schedule import Action, Channel, Costs, Kind, Placement, Schedule, Shape
from .agreement import check_agreement
from .communication import Communicator
from .data import SegmentIterator
from .documents import Packing, documents_of_step
from .gradient_sync import GradientSync
from .interpreter import Interpreter, Step
from .loss import LossLedger
from .plan import Plan
from .segmentation import Segmentation
from .tracer import Tracer


class PipelineExecutor:
    """Called like Megatron's `forward_backward_func`; made once, used for every step.

    `schedule` is the name of a family, `auto`, or a whole schedule, which fits training steps of its own shape only.
    `cut(sequence_length)` gives the lengths of the segments if there are several; `costs(lengths)` what `auto` plans
    for, equal costs if it is None. `sequence_length_is(length)` is entered around the user's forward step, for code
    that derives shapes from a global sequence length. With `packing` attention stays within the documents of a
    sequence. `placement` says which stages the model chunks of a rank are, see `Placement`; a whole schedule has its
    own. No state of a step survives it.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        num_segments: int,
        cut: Callable[[int], Sequence[int]],
        sequence_length_is: Callable[[int], AbstractContextManager] = nullcontext,
        timeout: timedelta = timedelta(minutes=10),
        tracer: Tracer | None = None,
        packing: Packing | None = None,
        costs: Callable[[Sequence[int]], Costs] | None = None,
        placement: str = "looped",
    ) -> None:
        self._plan = Plan(schedule, costs, one_queue=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1")
        self._placement = schedule.shape.placement.style if isinstance(schedule, Schedule) else placement
        self._segmentation = Segmentation(num_segments, cut, packing)
        self._sequence_length_is = sequence_length_is
        self._timeout = timeout
        self._tracer = tracer
        self._context = SegmentContext()
        self._weight_gradients = WeightGradientStore()
        self._communicators: dict[tuple[dist.ProcessGroup, Placement], Communicator] = {}
        self._agreed: set[str] = set()

    def __call__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Any,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int | None,
        micro_batch_size: int | None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run one step; arguments and return value as in megatron/core/pipeline_parallel/schedules.py.

        Returns one report per micro-batch on the rank that computes the loss, an empty list elsewhere.
        """
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        seq_length = seq_length or 0  # Megatron leaves it out where no message is sent
        config = get_model_config(chunks[0])
        if len(iterators) != len(chunks):
            raise ValueError(f"{len(chunks)} model chunks need a data iterator each, but {len(iterators)} were given")
        if self._segmentation.num_segments > 1 and decoder_seq_length not in (None, seq_length):
            raise ValueError("--decoder-seq-length differs from --seq-length, so sequences cannot be cut into segments")
        _check_messages(config, p2p_communicator, pg_collection, adjust_tensor_shapes_fn)
        if not hasattr(config, "calculate_per_token_loss"):
            config.calculate_per_token_loss = False  # Megatron asks for it, but only a TransformerConfig has it
        groups = pg_collection or _build_default_pg_collection()
        pipeline = groups.pp if p2p_communicator is None else p2p_communicator.pp_group
        shape = Shape(
            Placement(pipeline.size(), len(chunks), self._placement), num_microbatches, self._segmentation.num_segments
        )
        if shape.num_ranks > 1:  # a rank that needs nobody may run alone
            self._agree(shape, seq_length, micro_batch_size, forward_only)
        lengths = self._segmentation.lengths(seq_length)
        actions = self._plan.program(shape, lengths, pipeline.rank(), forward_only)
        if not self._segmentation.is_trivial:  # else nothing is needed, and the model keeps its own attention
            attach(chunks, self._context)
        if _another_goes_backward_first(actions):
            add_up_all_weight_gradients(chunks)

        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        batches = [iterator and SegmentIterator(iterator) for iterator in iterators]
        documents = self._documents(batches, shape, micro_batch_size, seq_length, pipeline, groups.tp)
        step = Step(
            forward_step_func=forward_step_func,
            chunks=chunks,
            batches=batches,
            segments=[
                self._segmentation.segments(number, seq_length, packed) for number, packed in enumerate(documents)
            ],
            config=config,
            message_shape=lambda length: get_tensor_shapes(
                seq_length=length,
                micro_batch_size=micro_batch_size,
                # As Megatron's functions have it: interleaved ones do not look at it.
                decoder_seq_length=decoder_seq_length if shape.num_segments == shape.num_chunks == 1 else None,
                config=config,
                tp_group=groups.tp,
                cp_group=groups.cp,
            )[0],
            context_parallel_size=groups.cp.size(),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        finalize = None
        if config.finalize_model_grads_func is not None and not forward_only:
            finalize = partial(
                config.finalize_model_grads_func, chunks, pg_collection=groups, force_all_reduce=force_all_reduce
            )
        reports = self._run(step, actions, shape, pipeline, self._segmentation.common_lengths(seq_length), finalize)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return reports

    def _run(
        self,
        step: Step,
        actions: Sequence[Action],
        shape: Shape,
        pipeline: dist.ProcessGroup,
        lengths: Sequence[int] | None,
        finalize: Callable[[torch.Tensor | None], None] | None,
    ) -> list[Any]:
        """Run the actions of this rank, then `finalize(number of tokens)`; nothing of the step stays, failed or not."""
        device, config, chunks = _device(), step.config, step.chunks
        losses = LossLedger(config.calculate_per_token_loss)
        sync = GradientSync(config, chunks, ends_last=len(chunks) == 1 and pipeline.rank() == 0)
        communicator = self._communicator(pipeline, shape.placement, config.pipeline_dtype, device)
        try:
            with ExitStack() as around:
                recorder = None
                if any(action.kind is Kind.W for action in actions):
                    around.enter_context(weight_gradients_left_in(self._weight_gradients, chunks))
                if self._tracer is not None and not step.forward_only:
                    tracing = self._tracer.step(self._plan.name, shape, pipeline, device, lengths)
                    recorder = around.enter_context(tracing)
                if recorder is not None:
                    stages = shape.placement.stages_of(pipeline.rank())
                    around.enter_context(collectives_watched(chunks, stages, recorder.collective))
                Interpreter(
                    step,
                    shape.placement,
                    pipeline.rank(),
                    communicator,
                    self._context,
                    self._weight_gradients,
                    losses,
                    sync,
                    self._sequence_length_is,
                    recorder,
                ).run(actions)
                sync.close()
                if finalize is not None:
                    num_tokens = None
                    if config.calculate_per_token_loss:
                        num_tokens = losses.total_num_tokens(device)
                        _take_from_last_stage(num_tokens, shape.placement, pipeline)
                    finalize(num_tokens)
        finally:
            sync.close()
            self._context.clear()
            self._weight_gradients.clear()
        return losses.reports()

    def _documents(
        self,
        batches: Sequence[SegmentIterator | None],
        shape: Shape,
        micro_batch_size: int | None,
        sequence_length: int,
        pipeline: dist.ProcessGroup,
        tensor: dist.ProcessGroup,
    ) -> Sequence[Documents | None]:
        """Those of every micro-batch of the step, told by the rank of the first stage; None where none are packed."""
        if self._segmentation.packing is None:
            return [None] * shape.num_microbatches
        return documents_of_step(
            batches[shape.placement.chunk_of(0)],
            (shape.num_microbatches, micro_batch_size, sequence_length),
            self._segmentation.packing.end_of_document,
            shape.placement.rank_of(0),
            pipeline,
            tensor,
            _device(),
        )

    def _communicator(
        self, group: dist.ProcessGroup, placement: Placement, dtype: torch.dtype, device: torch.device
    ) -> Communicator:
        key = group, placement
        if key not in self._communicators:
            channels = []
            for stage in range(placement.num_stages - 1):
                here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
                if here != there:
                    channels += Channel(Kind.F, here, there), Channel(Kind.B, there, here)
            self._communicators[key] = Communicator(group, channels, dtype, device, self._timeout)
        return self._communicators[key]

    def _agree(self, shape: Shape, sequence_length: int, micro_batch_size: int | None, forward_only: bool) -> None:
        """Compare this step with that of the other ranks, the first time that it is asked for."""
        plan = (
            f"{self._plan.name}, {'evaluation' if forward_only else 'training'} on {shape.num_ranks} ranks with "
            f"{shape.num_chunks} model chunks ({shape.placement.style}), {shape.num_microbatches} micro-batches of "
            f"{micro_batch_size} sequences, {self._segmentation.description(sequence_length)}"
        )
        if plan not in self._agreed:
            check_agreement(plan)
            self._agreed.add(plan)


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _check_messages(
    config: Any,
    p2p_communicator: Any,
    pg_collection: ProcessGroupCollection | None,
    adjust_tensor_shapes_fn: Callable | None,
) -> None:
    """Raise ValueError for what changes the messages between stages."""
    if type(p2p_communicator) not in (type(None), P2PCommunicator) or adjust_tensor_shapes_fn is not None:
        raise ValueError(
            "a p2p_communicator of its own kind and adjust_tensor_shapes_fn change the messages between stages, which "
            "our schedules lay out themselves; run this model without --pipeline-schedule and --sequence-splits"
        )
    if p2p_communicator is not None and pg_collection is None:
        raise ValueError("a p2p_communicator needs its pg_collection")
    if config.variable_seq_lengths or config.mtp_standalone:
        raise ValueError(
            "variable_seq_lengths and multi-token prediction on a pipeline stage of its own negotiate the shape of "
            "every message, which our schedules know in advance; run this model with Megatron's own schedule"
        )


def _another_goes_backward_first(actions: Sequence[Action]) -> bool:
    """Whether a chunk's first forward and its first weight gradient are of different units, as with segments."""
    firsts: dict[int, Action] = {}
    seen = set()
    for action in actions:
        if action.kind is Kind.F:
            firsts.setdefault(action.stage, action)
        elif action.kind in (Kind.B, Kind.W) and action.stage not in seen:
            seen.add(action.stage)
            if firsts[action.stage] != action._replace(kind=Kind.F):
                return True
    return False


def _take_from_last_stage(num_tokens: torch.Tensor, placement: Placement, pipeline: dist.ProcessGroup) -> None:
    """Megatron takes the count from the last rank, but the last stage of a V is on the first."""
    rank = placement.rank_of(placement.num_stages - 1)
    if rank != placement.num_ranks - 1:
        dist.broadcast(num_tokens, src=dist.get_process_group_ranks(pipeline)[rank], group=pipeline)
