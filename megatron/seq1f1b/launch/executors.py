"""Makes the executor that a PipelineConfig describes, for Megatron's training loop or for a program of its own."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from megatron.core.utils import get_model_config

from ..arguments import MegatronRun, PipelineConfig, run_of_program
from ..arguments.flags import TRACED_ITERATIONS
from ..model import PIECE, Documents
from ..process.one_caller import OneCaller
from ..process.ranks import results_on_all_ranks, warn_on_rank_0
from ..runtime import (
    MESSAGE_TIMEOUT,
    ActivationMemory,
    PipelineExecutor,
    ProgramContract,
    Repacking,
    Segmentation,
    Surroundings,
    Tracer,
)
from ..runtime.step import chunks_of, pipeline_of
from .v_chunks import in_forward_step


def training_executor(
    config: PipelineConfig,
    args: Namespace,
    end_of_document: Callable[[], int],
    divides_documents: bool = False,
    tracer: Tracer | None = None,
    surroundings: Surroundings | None = None,
) -> PipelineExecutor:
    """The executor for Megatron's training loop and `args`; `end_of_document()` is the token that ends a document. A
    script that `divides_documents` gives context-parallel ranks a share of each document, else of whole sequences. A
    rehearsal has `surroundings` of its own."""
    around_program = _in_a_v if config.is_v else sequences_of
    contract = ProgramContract(
        around_program=partial(around_program, args),
        divides_documents=divides_documents,
        reports_on_last_rank=True,
    )
    return _executor(
        config,
        tracer,
        contract=contract,
        end_of_document=end_of_document,
        surroundings=surroundings,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )


class ProgramExecutor:
    """The executor of a program without Megatron's arguments; called like Megatron's `forward_backward_func`.

    The first step of every model calls `configure(run)`, which may raise ValueError, that of one rank on all; the first
    configuration is kept. `keep_documents_apart` is for batches with `cu_seqlens` or a boolean `attention_mask`.
    """

    def __init__(self, configure: Callable[[MegatronRun], PipelineConfig], keep_documents_apart: bool = False) -> None:
        self._configure = configure
        self._keep_documents_apart = keep_documents_apart
        self._executor: PipelineExecutor | None = None
        self._checked: list[Any] = []  # the configurations of models
        self._training_steps = 0
        self._caller = OneCaller()

    def __call__(self, **step: Any) -> list[Any]:
        with self._caller.entered():
            return self._call(**step)

    def _call(self, *, model: Any, num_microbatches: int, seq_length: int | None = None, **step: Any) -> list[Any]:
        of_model = get_model_config(chunks_of(model)[0])
        if not any(of_model is checked for checked in self._checked):
            executors: list[PipelineExecutor] = []

            def configure() -> None:
                size = step.get("micro_batch_size")
                run = run_of_program(model, num_microbatches, seq_length, size, self._keep_documents_apart)
                executors.append(self._executor_of(self._configure(run)))

            pipeline = pipeline_of(step.get("p2p_communicator"), step.get("pg_collection"))
            if pipeline.size() > 1:
                results_on_all_ranks(configure, "the schedule of a model")
            else:
                configure()
            self._executor = self._executor or executors[0]
            self._checked.append(of_model)
        self._training_steps += not step.get("forward_only", False)
        assert self._executor is not None, "there is one from the first model on"
        return self._executor(model=model, num_microbatches=num_microbatches, seq_length=seq_length, **step)

    def _executor_of(self, config: PipelineConfig) -> PipelineExecutor:
        tracer = tracer_of(config, lambda: self._training_steps)
        # Programs divide packs among context-parallel ranks by documents, as Transformer Engine wants them.
        contract = ProgramContract(divides_documents=True)
        return _executor(config, tracer, contract=contract, from_calls=True)


def tracer_of(config: PipelineConfig, iteration_now: Callable[[], int]) -> Tracer | None:
    """The tracer of `--pipeline-trace`; `iteration_now()` is the number of the running iteration."""
    if config.flags.pipeline_trace is None:
        return None
    iterations = config.flags.pipeline_trace_iterations or TRACED_ITERATIONS
    return Tracer(config.flags.pipeline_trace, iterations, iteration_now)


def _executor(
    config: PipelineConfig,
    tracer: Tracer | None,
    contract: ProgramContract,
    end_of_document: Callable[[], int] | None = None,
    from_calls: bool = False,
    surroundings: Surroundings | None = None,
    timeout: timedelta = MESSAGE_TIMEOUT,
) -> PipelineExecutor:
    flags = config.flags
    schedule = config.schedule
    assert schedule is not None, "Megatron's own schedules need no executor"
    surroundings = surroundings or Surroundings()
    warn_on_rank_0(f"steps are run by megatron.seq1f1b: {schedule.title}, {_parts(config)}")
    activations = ActivationMemory(
        loss_piece=None if flags.keep_logits else PIECE,
        keeps_attention=bool(flags.recompute_keeps_attention),
        offloads=config.offloads,
        host_memory=surroundings.host_memory(flags.offload_layers_leaving),
    )
    return PipelineExecutor(
        schedule=schedule,
        segmentation=_segmentation(config, end_of_document, from_calls, surroundings),
        costs=config.costs_of_actions,
        activations=activations,
        contract=contract,
        kernels_of=surroundings.kernels_of,
        timeout=timeout,
        tracer=tracer,
    )


def _parts(config: PipelineConfig) -> str:
    if config.flags.unit_tokens is not None:
        return f"units of at most {config.flags.unit_tokens} tokens"
    if config.flags.segment_tokens is not None:
        return f"segments of at most {config.flags.segment_tokens} tokens"
    return f"segments: {config.num_segments}"


def _segmentation(
    config: PipelineConfig,
    end_of_document: Callable[[], int] | None,
    from_calls: bool,
    surroundings: Surroundings,
) -> Segmentation:
    cut_once = lru_cache(config.cut)  # micro-batches of one size are cut alike
    cuts_by_documents = config.partition.follows_documents

    def cut(length: int, documents: Documents | None = None, num_segments: int | None = None, /) -> tuple[int, ...]:
        return cut_once(length, documents if cuts_by_documents else None, num_segments)

    packed = config.follows_documents
    end_token = end_of_document() if packed and end_of_document else None
    if config.flags.unit_tokens is not None:
        return Repacking(pack=config.pack, end_of_document=end_token, source=surroundings.source)
    has_one_number = config.flags.segment_tokens is None
    cuts_sequences = config.num_segments > 1 or not has_one_number
    return Segmentation(
        num_segments=config.num_segments if has_one_number else None,
        cut=cut,
        packed=packed,
        end_of_document=end_token,
        from_calls=from_calls and cuts_sequences,
        from_variable_calls=from_calls,
        segments_for=config.segments_for,
        read_calls=surroundings.read_calls,
    )


@contextmanager
def sequences_of(args: Namespace, stage: int, length: int) -> Iterator[None]:
    """Inside, Megatron's `seq_length` is `length`, that of a pack in units or of a segment: its functions for
    tensor-parallel ranks without data allocate by it."""
    whole = args.seq_length
    args.seq_length = length
    try:
        yield
    finally:
        args.seq_length = whole


@contextmanager
def _in_a_v(args: Namespace, stage: int, length: int) -> Iterator[None]:
    with sequences_of(args, stage, length), in_forward_step(stage):
        yield
