"""The function that `get_forward_backward_func` returns: it runs any schedule, for training and evaluation.

Tested in functional_tests/test_executor.py by test_after_a_failure_no_rank_takes_a_step.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..model import (
    KernelChoice,
    KernelsOf,
    LayerEnds,
    SegmentContext,
    add_up_all_weight_gradients,
    attach,
    compute_loss_in_pieces,
    defer_weight_gradients,
    link_rate,
    recompute_behind_frozen_weights,
    refuse_attention_to_later_tokens,
    refuse_unknown_layers,
)
from ..process.causes import has_lost_a_peer
from ..process.one_caller import OneCaller
from ..process.patches import patched
from ..process.ranks import check_agreement, results_on_all_ranks
from ..process.scarce_memory import lacks_memory, let_go
from ..process.step_failure import explained
from ..schedule import FAMILIES, CostsOfLengths, ScheduleChoice
from .activation_memory import ActivationMemory
from .communication import Communicator
from .forwards.forward_segments import SegmentForwards
from .forwards.forward_whole import WholeForwards
from .forwards.loss import Losses
from .forwards.multi_token import prediction_patches
from .forwards.protocol import Forwards
from .forwards.schedule_plans import PlannedForwards
from .gradients.gradient_sync import check_tied_embeddings, finalize_gradients, gradient_syncs
from .gradients.partitioned_state import is_partitioned
from .interpreter import Interpreter
from .model_calls.calls import Calls
from .pair_interpreter import PairInterpreter
from .program_contract import ProgramContract
from .rank_schedule import RankSchedule, RankSchedules
from .recording.megatron_steps import run_traced
from .recording.recorder import Recorder, StepRecorder
from .recording.tracer import StepTracer
from .reference import references_of_chunks, run_references
from .segments.segmentation import Segmentation
from .step import Step, chunks_of, pipeline_of

MESSAGE_TIMEOUT = timedelta(minutes=10)  # as in PyTorch's groups

# What of a call a step is planned for, and the sizes of its micro-batches; all ranks must prepare it together when one
# of these is new.
_PLANNED_FOR = "num_microbatches", "forward_only"
_SIZES = "seq_length", "decoder_seq_length", "micro_batch_size"


class PipelineExecutor:
    """Runs every step of a program; called like Megatron's `forward_backward_func`, and made once.

    No state of a step survives it. After a step that failed in a pipeline of several ranks every call raises
    RuntimeError: the other ranks stopped in the middle of it, and their messages no longer match.

    - `schedule`: the order of the actions of a step.
    - `segmentation`: how micro-batches are cut into segments.
    - `costs(lengths)`: what `auto` plans for, by the lengths of segments in tokens; equal costs if it is None.
    - `activations`: what forwards keep for backwards, and where.
    - `contract`: what the program expects of the executor.
    - `kernels_of(configuration)`: the attention kernels for a model.
    - `timeout`: the longest wait for a message.
    - `tracer`: records training steps.
    """

    def __init__(
        self,
        schedule: ScheduleChoice,
        segmentation: Segmentation,
        costs: CostsOfLengths | None = None,
        activations: ActivationMemory | None = None,
        contract: ProgramContract | None = None,
        kernels_of: KernelsOf = KernelChoice.of_config,
        timeout: timedelta = MESSAGE_TIMEOUT,
        tracer: StepTracer | None = None,
    ) -> None:
        activations = activations or ActivationMemory()
        # A GPU has 8 hardware queues by default, and at most 32, enough for all streams of a process.
        shares_queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "32"
        self.context = SegmentContext(activations.keeps_attention, activations.host_memory)
        self._schedule = schedule
        self._rank_schedules = RankSchedules(
            choice=schedule,
            costs=costs,
            one_queue=shares_queues,
            offloaded=activations.offloads,
            by_layer=activations.moves_layers,
        )
        self.segmentation = segmentation
        self.recorder: StepRecorder | None = None  # of the last training step
        self._activations = activations
        self._contract = contract or ProgramContract()
        self._kernels_of = kernels_of
        self._tracer = tracer
        self._layer_ends = LayerEnds(activations.host_memory.end_layer)
        self._communicator = cache(partial(Communicator, timeout=timeout))
        # What all ranks have prepared: plans of steps of each model of the program, by its first chunk on this rank,
        # references, and orders by shapes and lengths of segments.
        self._plans_of_model: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()
        self._references = WeakSet[torch.nn.Module]()
        self._orders: set[tuple] = set()
        # Kinds of steps, whose kernels are loaded, of each model of the program, by its first chunk on this rank.
        self._ran_before: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()
        self._failure: str | None = None
        self._num_steps = 0
        self._caller = OneCaller()

    def watch(self, tracer: StepTracer) -> None:
        """Let `tracer`, in place of any other, record the training steps from now on."""
        self._tracer = tracer

    def host_rate(self) -> float:
        """Bytes/s of the slowest rank's link to the host, each way, while all ranks use both ways."""
        device = torch.device(torch.cuda.current_device())
        rate = torch.tensor(link_rate(device, dist.barrier), device=device)
        dist.all_reduce(rate, dist.ReduceOp.MIN)
        return rate.item()

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step, called as in megatron/core/pipeline_parallel/schedules.py. Returns one report per micro-batch
        on the rank that computes the loss, else an empty list."""
        with self._caller.entered():
            return self._run_step(**arguments)

    def _run_step(
        self,
        *,
        model: torch.nn.Module | list[torch.nn.Module],
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        **arguments: Any,
    ) -> list[Any]:
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._failure}), and its ranks have been out of step since "
                "then; end the program, and start it again from a checkpoint"
            )
        self._num_steps += 1
        pipeline = pipeline_of(p2p_communicator, pg_collection)
        make_step = partial(
            Step,
            model=model,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            style=self._schedule.placement,
            **arguments,
        )
        first_chunk, *_ = chunks_of(model)
        known_plans = self._plans_of_model.setdefault(first_chunk, set())
        planned_for: tuple[str, ...] = _PLANNED_FOR
        if not self.segmentation.reads_calls(get_model_config(first_chunk)):  # else replicas may have other sizes
            planned_for += _SIZES
        plan = tuple(arguments.get(name) for name in planned_for)
        if pipeline.size() > 1 and plan not in known_plans:
            self._prepare_on_all_ranks(make_step, pipeline)
            known_plans.add(plan)
        with self._failing_for_good(pipeline):
            step, lengths = self._prepared(make_step)
            # The first step of a model with such segments may load or compile kernels, and CUDA may then wait for the
            # whole GPU. If messages are kernels, none is in flight in that step while another kernel starts.
            ran_before = self._ran_before.setdefault(step.chunks[0], set())
            kind_of_step = step.placement, lengths, step.micro_batch_size, step.forward_only
            communicator = self._communicator(step.pipeline, step.placement, step.config.pipeline_dtype, step.device)
            communicator.begin_step(loads_kernels=kind_of_step not in ran_before)
            with timed(step.config):
                losses = self._run_calls(step, communicator)
                reports = self._reports(losses, step)
            ran_before.add(kind_of_step)
        return reports

    def _prepare_on_all_ranks(self, make_step: Callable[[], Step], pipeline: dist.ProcessGroup) -> None:
        """Prepare a new plan or model on all ranks, before any of them begins its step. Raises the error of one on all,
        or ValueError if what they are to run differs; they may then take other steps."""

        def plan() -> str:
            return self._in_words(*self._prepared(make_step))

        try:
            check_agreement(plan, f"the model and the plan of step {self._num_steps}")
            step = make_step()
            if not step.forward_only:
                check_tied_embeddings(step)
        except RuntimeError as error:
            if not has_lost_a_peer(error):
                raise
            raise self._failed(error, pipeline) from error

    def _prepared(self, make_step: Callable[[], Step]) -> tuple[Step, tuple[int, ...]]:
        """A step, and the lengths of its segments if they are known before the program calls its model, else none.
        Raises ValueError for one that cannot be run."""
        step = make_step()
        if self.segmentation.cuts_sequences:
            refuse_uncut(step)
        self._prepare_models(step)
        if self.segmentation.reads_calls(step.config):
            return step, ()
        return step, tuple(self.segmentation.lengths(step.seq_length))

    def _run_calls(self, step: Step, communicator: Communicator) -> Losses:
        """Cut the step, run the references that its program calls, if any, and then its own model."""
        schedule_of = partial(self._rank_schedule, in_turn=communicator.goes_in_turn)
        suspended = Calls(step, self._contract) if self._suspends_calls(step) else nullcontext()
        with suspended as calls:
            self._cut(step, calls)
            if calls is not None:
                cut_again = None
                if self.segmentation.cuts_every_call(step):
                    cut_again = partial(self._cut, step, calls)
                losses = run_references(
                    step=step,
                    calls=calls,
                    schedule_of=schedule_of,
                    communicator=communicator,
                    context=self.context,
                    follows_segments=self.segmentation.follows_segments,
                    prepare=self._prepare_references,
                    cut_again=cut_again,
                )
                if calls.have_ended:
                    return losses
            return self._run_actions(step, calls, schedule_of(step), communicator)

    def _cut(self, step: Step, calls: Calls | None) -> None:
        """Cut the step into segments, and let its model compute losses of such micro-batches."""
        self.segmentation.cut_step(step, calls)
        compute_loss_in_pieces(step.chunks, step.most_tokens, self._activations.loss_piece)

    def _prepare_models(self, step: Step) -> None:
        """Let the model chunks of this rank run by actions; those of an earlier step are ready. Raises ValueError for a
        model that cannot."""
        self._let_run_on_segments(step.chunks)
        if self.context.kept_attention is not None and not self.segmentation.follows_segments:
            attach(step.chunks, self.context, self._kernels_of)  # of whole sequences, too
        if self._activations.moves_layers:
            self._layer_ends.follow(step.chunks)
        add_up_all_weight_gradients(step.chunks)
        recompute_behind_frozen_weights(step.chunks)

    def _prepare_references(self, step: Step, calls: Calls) -> None:
        """Let the references that a step calls run on segments; of those that are new, on all ranks of the replica
        before any of them runs one, so that the error of one is raised on all."""
        called = calls.references  # which replicas may call in different steps

        def prepare() -> None:
            self._let_run_on_segments(references_of_chunks(step, calls))

        if step.is_alone or self._references.issuperset(called):
            prepare()
        else:
            _through_replica(step, results_on_all_ranks, prepare, f"a reference in step {self._num_steps}")
            self._references.update(called)

    def _let_run_on_segments(self, chunks: list[torch.nn.Module]) -> None:
        """Let chunks of a model, or of a reference, follow segments if there are any. Raises ValueError for those that
        cannot."""
        if self.segmentation.cuts_sequences:
            refuse_attention_to_later_tokens(chunks)
        if self.segmentation.follows_segments:  # else the model keeps its own attention
            refuse_unknown_layers(chunks)
            attach(chunks, self.context, self._kernels_of)

    def _goes_by_plans(self, step: Step) -> bool:
        """Whether the step runs by Megatron's schedule plans, which its pairs need."""
        return self._schedule.pairs and not step.forward_only

    def _suspends_calls(self, step: Step) -> bool:
        """Whether the model runs on parts of what the program calls it with; else on each micro-batch as it comes."""
        if self.segmentation.reads_calls(step.config) or self.segmentation.cuts_sequences:
            return True
        # Programs read micro-batches in order, so calls wait where a schedule runs them in another one.
        keeps_order = step.forward_only or self._schedule.keeps_order
        # Only a call knows the tokens of all context-parallel ranks, over which the loss is a mean (forwards/loss.py),
        # and which multi-token prediction reads. Megatron averages the means of shares, in which a mask leaves unequal
        # numbers of tokens: without this, four uncut steps of test_equality.py, cp2*/1f1b-k1, are off by up to 2.4e-1.
        divides_tokens = step.groups.cp.size() > 1
        return not keeps_order or divides_tokens or self._goes_by_plans(step)

    @contextmanager
    def _failing_for_good(self, pipeline: dist.ProcessGroup) -> Iterator[None]:
        """Let a failure within end this pipeline, and tell what the ranks know of it; no state of the step stays."""
        try:
            yield
        except BaseException as error:
            if pipeline.size() == 1:
                raise
            told = self._failed(error, pipeline)
            if told is error:
                raise
            raise told from error
        finally:
            self.context.clear()

    def _failed(self, error: BaseException, pipeline: dist.ProcessGroup) -> BaseException:
        """The error to raise instead of `error`, which ends this pipeline: its ranks are out of step from now on."""
        self._failure = type(error).__name__  # should there be no memory for more
        if lacks_memory(error):
            let_go(error)
        name_of_step = f"{pipeline.group_name}, {self._num_steps}"
        told = explained(error, name_of_step, dist.get_process_group_ranks(pipeline))
        self._failure = f"{type(error).__name__}: {error}" if told is error else str(told)
        return told

    def _rank_schedule(self, step: Step, in_turn: bool) -> RankSchedule:
        lengths = step.longest_lengths
        make = partial(
            self._rank_schedules.of_step,
            step.shape,
            lengths,
            rank=step.rank,
            forward_only=step.forward_only,
            in_turn=in_turn,
            is_partitioned=is_partitioned(step.chunks),
        )
        # A family has the same order on every rank. A search is for costs of each rank's own, which must be the same,
        # and a schedule of a user's own may lack what one of the ranks needs.
        is_of_a_family = step.forward_only or self._schedule.name in FAMILIES
        new = step.shape, lengths
        if not (step.is_alone or is_of_a_family or new in self._orders):
            of_step = f"of {step.shape}, planned for segments of {list(lengths)} tokens"

            def plan() -> str:
                return f"the order {make().planned} {of_step}"

            _through_replica(step, check_agreement, plan, f"the order {of_step}")
            self._orders.add(new)
        return make()

    def _run_actions(
        self, step: Step, calls: Calls | None, schedule: RankSchedule, communicator: Communicator
    ) -> Losses:
        """Run the actions of this rank, then Megatron's end of the step."""
        self.context.splits_backwards = schedule.splits_backwards
        syncs = gradient_syncs(step.config, step.chunks, finishes_last=len(step.chunks) == 1 and step.rank == 0)
        losses = Losses(step, syncs)
        with ExitStack() as around:
            for sync in syncs:
                around.callback(sync.close)  # also after a failure
            if schedule.splits_backwards:
                around.enter_context(defer_weight_gradients(self.context.weight_gradients, step.chunks))
            if calls is not None:
                around.enter_context(patched(prediction_patches(step, self.context, calls)))
            recorder = around.enter_context(self._recording(step))
            if not step.forward_only:
                self.recorder = recorder
            interpreter = PairInterpreter if self._goes_by_plans(step) else Interpreter
            interpreter(
                step=step,
                schedule=schedule,
                communicator=communicator,
                context=self.context,
                forwards=self._forwards(step, calls, losses),
                syncs=syncs,
                recorder=recorder,
            ).run()
            for sync in syncs:
                sync.close()
            self.context.masks.settle()
            if not step.forward_only:
                finalize_gradients(step, losses)
        return losses

    def _reports(self, losses: Losses, step: Step) -> list[Any]:
        """The return value of the step on this rank."""
        reports = self.segmentation.reports(losses.reports(), step)
        return self._on_last_rank(reports, step) if self._contract.reports_on_last_rank else reports

    def _forwards(self, step: Step, calls: Calls | None, losses: Losses) -> Forwards:
        """The forwards of the step: on parts of the program's calls, or on whole micro-batches."""
        if calls is None:
            return WholeForwards(step=step, context=self.context, losses=losses, contract=self._contract)
        forwards = PlannedForwards if self._goes_by_plans(step) else SegmentForwards
        return forwards(
            step=step,
            context=self.context,
            losses=losses,
            calls=calls,
            follows_segments=self.segmentation.follows_segments,
        )

    def _recording(self, step: Step) -> AbstractContextManager[StepRecorder]:
        """A context around the step; what it gives notes the actions: for the tracer in training, if there is one."""
        if self._tracer is None or step.forward_only:
            return Recorder(step.device)
        return self._tracer.step(self._schedule.title, step.shape, step.chunks, step.pipeline, step.common_lengths)

    def _on_last_rank(self, reports: list[Any], step: Step) -> list[Any]:
        """The reports, sent to the last rank, where Megatron's training loop reads them."""
        source = step.placement.rank_of(step.placement.num_stages - 1)
        last = step.placement.num_ranks - 1
        if source == last or step.rank not in (source, last):
            return reports
        ranks = dist.get_process_group_ranks(step.pipeline)
        shared = [tree_map_only(Tensor, Tensor.cpu, reports)]
        if step.rank == source:
            dist.send_object_list(shared, ranks[last], group=step.pipeline)
        else:
            dist.recv_object_list(shared, ranks[source], group=step.pipeline)
        return tree_map_only(Tensor, lambda report: report.to(step.device), shared[0])

    def _in_words(self, step: Step, lengths: tuple[int, ...]) -> str:
        """What all ranks are to run, the same on each of them."""
        placement = step.placement
        config = step.config
        sizes = f"of {step.micro_batch_size} sequences, segments of {list(lengths)} tokens"
        if self.segmentation.reads_calls(step.config):
            sizes = "of the sizes that the first stage tells"
        within = " within documents" if self.segmentation.packed else ""
        kind = "evaluation" if step.forward_only else "training"
        num_layers = getattr(config, "num_layers", "its own")
        return (
            f"{self._schedule.title}, {kind} on {placement.num_ranks} ranks with {placement.num_chunks} model chunks "
            f"({placement.style}), {step.num_microbatches} micro-batches {sizes}{within}, of a model with "
            f"{num_layers} layers and messages of {config.hidden_size} {config.pipeline_dtype}"
        )


def watched(function: Callable, tracer: StepTracer) -> Callable:
    """A `forward_backward_func`, ours or Megatron's, that reports every action of every training step to `tracer`."""
    if isinstance(function, PipelineExecutor):
        function.watch(tracer)
        return function
    return partial(run_traced, function, tracer)


def _through_replica(step: Step, exchange: Callable[..., Any], make: Callable[[], Any], what: str) -> None:
    """Call `exchange(make, what, group)` so that the error of a rank reaches all ranks of its replica: the others of
    its pipeline have it first, and each of these tells its neighbours."""
    for group in (step.pipeline, step.groups.tp, step.groups.cp):
        make = partial(exchange, make, what, group)
    make()


def refuse_uncut(step: Step) -> None:
    """Raise ValueError for a call whose sequences cannot be cut."""
    if step.decoder_seq_length not in (None, step.seq_length):
        raise ValueError("--decoder-seq-length differs from --seq-length, so sequences cannot be cut into segments")


@contextmanager
def timed(config: Any) -> Iterator[None]:
    """Megatron's timer of a step. Of the timers that a failed step has started none runs on: nothing could start it
    again."""
    if not config.timers:
        yield
        return
    ran_before = running_timers(config.timers)
    try:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        yield
    except BaseException:
        for timer in running_timers(config.timers) - ran_before:
            timer.reset()  # to stop it would wait for a GPU that may have failed
        raise
    config.timers("forward-backward").stop()


def running_timers(timers: Any) -> set[Any]:
    """Those of Megatron's timers that run."""
    return {timer for timer in getattr(timers, "_timers", {}).values() if timer._started}
