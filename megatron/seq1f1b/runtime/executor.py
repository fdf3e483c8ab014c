"""What `get_forward_backward_func` returns: runs any schedule, for training and evaluation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ..model import (
    PIECE,
    HostMemory,
    MovableResults,
    SegmentContext,
    WeightGradientStore,
    add_up_all_weight_gradients,
    attach,
    compute_loss_in_pieces,
    defer_weight_gradients,
    link_rate,
    refuse_attention_to_later_tokens,
)
from ..process.patches import patched
from ..process.ranks import check_agreement
from ..schedule import CostsOfLengths, Placement, ScheduleChoice, channels_of
from .call import Call
from .communication import Communicator
from .gradient_sync import add_up_tied_embeddings
from .interpreter import Interpreter, Step
from .loss import LossLedger
from .partitioned_state import gradient_sync, is_partitioned
from .prediction import prediction_heads
from .program import Program, Programs, streams_share_queues
from .recorder import Reading, Recorder
from .segmentation import Apart, Segmentation
from .tracer import Tracer


class PipelineExecutor:
    """Called like Megatron's `forward_backward_func`; made once, used for every step.

    `auto` plans for `costs(lengths)`, for equal costs if it is None. `around_forward(stage, length)` is entered around
    the user's forward step, for code that derives shapes, or what it reads, from globals. No wait for a message is
    longer than `timeout`. `reports_on_last_rank` sends the reports to the last rank of the pipeline if another one
    computes the loss. The loss is computed in pieces of `piece` logits (model/loss_pieces.py); None keeps all logits.

    The first step with segments of certain lengths may load or compile kernels, and CUDA may then wait for the whole
    GPU. If messages are kernels, none is in flight in that step while another kernel starts.

    No state of a step survives it. A step that fails closes the executor, since the other ranks stopped in the middle
    of the step and their messages no longer match. Every later call raises RuntimeError.
    """

    def __init__(
        self,
        schedule: ScheduleChoice,
        segmentation: Segmentation,
        costs: CostsOfLengths | None = None,
        around_forward: Callable[[int, int], AbstractContextManager] = lambda stage, length: nullcontext(),
        timeout: timedelta = timedelta(minutes=10),
        reports_on_last_rank: bool = False,
        piece: int | None = PIECE,
    ) -> None:
        self._programs = Programs(schedule, costs, streams_share_queues())
        self._segmentation = segmentation
        self._around_forward = around_forward
        self._timeout = timeout
        self.tracer: Tracer | None = None  # records training steps
        self.recorder: Recorder | None = None  # of the last training step
        self._reports_on_last_rank = reports_on_last_rank
        self._piece = piece
        self._host_memory = HostMemory()
        self._context = SegmentContext(self._host_memory.keep)
        self._weight_gradients = WeightGradientStore()
        self._communicators: dict[tuple[dist.ProcessGroup, Placement], Communicator] = {}
        self._agreed: set[str] = set()
        self._ran_before: set[tuple] = set()
        self._failure: str | None = None

    def keep_attention(self) -> None:
        """Run the attention of a recomputed layer once; the repeated forward takes its results."""
        self._context.kept_attention = MovableResults(self._host_memory)

    def offload(self, share: float) -> None:
        """Move a `share` of what forwards leave for their backwards to the memory of the host, see `units_to_move`."""
        self._programs.offloaded = share

    def host_rate(self) -> float:
        """Bytes/s of the link to the host, each way while both are in use by all ranks; of the slowest of them."""
        device = torch.device(torch.cuda.current_device())
        rate = torch.tensor(link_rate(device, dist.barrier), device=device)
        dist.all_reduce(rate, dist.ReduceOp.MIN)
        return rate.item()

    def last_step(self) -> Reading | None:
        """The measurements of the last training step, if there was one."""
        return self.recorder and self.recorder.reading()

    def documents(self) -> Apart | None:
        """The documents of the last training step, if they are kept apart."""
        return self._segmentation.apart

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step; arguments and return value as in megatron/core/pipeline_parallel/schedules.py.

        Returns one report per micro-batch on the rank that computes the loss, an empty list elsewhere.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._failure}), and its ranks have been out of step since "
                "then; end the program, and start it again from a checkpoint"
            )
        call = Call(**arguments)
        if self._segmentation.cuts_sequences:
            refuse_attention_to_later_tokens(call.chunks)
            if call.decoder_seq_length not in (None, call.seq_length):
                raise ValueError(
                    "--decoder-seq-length differs from --seq-length, so sequences cannot be cut into segments"
                )
        placement = Placement(call.pipeline.size(), len(call.chunks), self._programs.placement)
        if placement.num_ranks > 1:  # a pipeline of one rank may run without the others
            self._agree(placement, call)
        lengths = self._segmentation.lengths(call.seq_length)
        communicator = self._communicator(call, placement)
        kernels = placement, tuple(lengths), call.micro_batch_size, call.forward_only
        communicator.goes_in_turn = communicator.is_on_device and kernels not in self._ran_before
        is_packed, keeps = self._segmentation.packing is not None, self._context.kept_attention is not None
        if self._segmentation.cuts_sequences or is_packed or keeps:  # else the model keeps its own attention
            attach(call.chunks, self._context)
        add_up_all_weight_gradients(call.chunks)
        num_tokens = call.seq_length * (call.micro_batch_size or 0) // call.groups.cp.size()
        compute_loss_in_pieces(call.chunks, num_tokens, self._piece)

        timers = call.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=call.config.barrier_with_L1_time)
        try:
            check = partial(self._context.masks.require_causal, may_be_inverted=True)
            step = self._segmentation.cut_step(call, placement, check)
            program = self._programs.program(
                step.shape, lengths, step.rank, call.forward_only, communicator.goes_in_turn
            )
            if is_partitioned(call.chunks):
                program = program.with_partitioned_state
            self._context.splits_backwards = program.splits_backwards
            reports = self._run(step, program, communicator)
            self._ran_before.add(kernels)
        except BaseException as error:
            if placement.num_ranks > 1:
                self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._context.clear()
            self._weight_gradients.clear()
            self._host_memory.clear()
        if timers is not None:
            timers("forward-backward").stop()
        return reports

    def _run(self, step: Step, program: Program, communicator: Communicator) -> list[Any]:
        """Run the actions of this rank, then Megatron's end of the step."""
        call, shape = step.call, step.shape
        losses = LossLedger(call.config.calculate_per_token_loss, call.groups.cp)
        sync = gradient_sync(call.config, call.chunks, ends_last=len(call.chunks) == 1 and step.rank == 0)
        with ExitStack() as around:
            around.callback(sync.close)
            if program.splits_backwards:
                around.enter_context(defer_weight_gradients(self._weight_gradients, call.chunks))
            if shape.num_segments > 1 or call.groups.cp.size() > 1 or self._segmentation.packing is not None:
                heads = prediction_heads(call, shape.placement, step.rank, step.batches, self._context)
                if heads is not None:
                    around.enter_context(patched(heads.patches()))
            if self.tracer is None or call.forward_only:
                recorder = around.enter_context(Recorder(call.device))
            else:
                lengths = {tuple(segment.length for segment in segments) for segments in step.segments}
                of_all = lengths.pop() if len(lengths) == 1 else None
                tracing = self.tracer.step(self._programs.name, shape, call.chunks, call.pipeline, of_all)
                recorder = around.enter_context(tracing)
            if not call.forward_only:
                self.recorder = recorder
            interpreter = Interpreter(
                step,
                program,
                communicator=communicator,
                context=self._context,
                weight_gradients=self._weight_gradients,
                losses=losses,
                sync=sync,
                around_forward=self._around_forward,
                recorder=recorder,
                around=partial(self._programs.around, shape, self._segmentation.lengths(call.seq_length), step.rank),
                host_memory=self._host_memory,
            )
            interpreter.run()
            sync.close()
            losses.checks.make_up()
            self._context.masks.settle()
            if call.config.finalize_model_grads_func is not None and not call.forward_only:
                num_tokens = None
                if call.config.calculate_per_token_loss:
                    num_tokens = losses.total_num_tokens(call.device)
                    if shape.placement.turns:  # the loss may be on the first rank, but Megatron takes the last one's
                        dist.all_reduce(num_tokens, group=call.pipeline)
                call.config.finalize_model_grads_func(
                    call.chunks, num_tokens, pg_collection=call.groups, force_all_reduce=call.force_all_reduce
                )
                add_up_tied_embeddings(call.chunks)
        reports = self._segmentation.reports(losses.reports(), call)
        return self._on_last_rank(reports, shape.placement, call) if self._reports_on_last_rank else reports

    def _on_last_rank(self, reports: list[Any], placement: Placement, call: Call) -> list[Any]:
        """The reports, sent to the last rank, where Megatron's training loop reads them. Other ranks do not wait."""
        source, last = placement.rank_of(placement.num_stages - 1), placement.num_ranks - 1
        pipeline, ranks = call.pipeline, dist.get_process_group_ranks(call.pipeline)
        if source == last or pipeline.rank() not in (source, last):
            return reports
        if pipeline.rank() == source:
            dist.send_object_list([tree_map_only(torch.Tensor, torch.Tensor.cpu, reports)], ranks[last], group=pipeline)
            return reports
        received = [reports]
        dist.recv_object_list(received, ranks[source], group=pipeline)
        return tree_map_only(torch.Tensor, lambda report: report.to(call.device), received[0])

    def _communicator(self, call: Call, placement: Placement) -> Communicator:
        key = call.pipeline, placement
        if key not in self._communicators:
            ranks = range(placement.num_ranks)
            channels = chain.from_iterable(channels_of(placement, rank).values() for rank in ranks)
            self._communicators[key] = Communicator(
                call.pipeline, channels, call.config.pipeline_dtype, call.device, self._timeout
            )
        return self._communicators[key]

    def _agree(self, placement: Placement, call: Call) -> None:
        """Compare the plan of this step with that of the other ranks, once for each plan."""
        plan = (
            f"{self._programs.name}, {'evaluation' if call.forward_only else 'training'} on {placement.num_ranks} "
            f"ranks with {placement.num_chunks} model chunks ({placement.style}), {call.num_microbatches} "
            f"micro-batches of {call.micro_batch_size} sequences, {self._segmentation.description(call.seq_length)}, "
            f"of a model with {getattr(call.config, 'num_layers', 'its own')} layers and messages of "
            f"{call.config.hidden_size} {call.config.pipeline_dtype}"
        )
        if plan not in self._agreed:
            check_agreement(plan)
            self._agreed.add(plan)
