"""One step: a call of Megatron's `forward_backward_func`, normalised and checked."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from ..model import Segment
from ..schedule import Placement, Shape


@dataclass(kw_only=True)
class Step:
    """The arguments of one call, see megatron/core/pipeline_parallel/schedules.py, on one rank of a pipeline.

    `chunks` are the model chunks of this rank, `iterators` their data. `seq_length` is 0 if Megatron leaves it out
    because no message is sent. `Segmentation.cut_step` sets `segments[m][s]`, segment s of micro-batch m, and
    `num_sequences[m]`, how many it has side by side. Raises ValueError for a call that our schedules cannot follow.
    """

    forward_step_func: Callable
    data_iterator: InitVar[Any]
    model: InitVar[torch.nn.Module | list[torch.nn.Module]]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int | None
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable | None = None
    p2p_communicator: Any = None
    pg_collection: InitVar[ProcessGroupCollection | None] = None
    force_all_reduce: bool = False
    style: InitVar[str] = "looped"

    segments: Sequence[Sequence[Segment]] = ()
    num_sequences: Sequence[int] = ()

    def __post_init__(self, data_iterator: Any, model: Any, pg_collection: Any, style: str) -> None:
        self.chunks = chunks_of(model)
        self.iterators: list[Any] = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if len(self.iterators) != len(self.chunks):
            raise ValueError(
                f"{len(self.chunks)} model chunks need a data iterator each, but {len(self.iterators)} were given"
            )
        self.seq_length = self.seq_length or 0
        self.config: Any = get_model_config(self.chunks[0])
        if not hasattr(self.config, "calculate_per_token_loss"):
            self.config.calculate_per_token_loss = False  # Megatron reads it, but only a TransformerConfig has it
        if self.p2p_communicator is not None and pg_collection is None:
            raise ValueError("a p2p_communicator needs its pg_collection")
        self._refuse_unsupported()
        self.groups = pg_collection or default_groups()
        # The ranks that divide the tokens of activations among each other, if any do.
        self.sequence_parallel = self.groups.tp if getattr(self.config, "sequence_parallel", False) else None
        self.pipeline = pipeline_of(self.p2p_communicator, self.groups)
        refuse_waits(self.config, self.pipeline)
        self.rank: int = self.pipeline.rank()
        self.placement = Placement(self.pipeline.size(), len(self.chunks), style)

    def _refuse_unsupported(self) -> None:
        """Raise ValueError for an argument or a setting that our schedules cannot follow."""
        is_known = type(self.p2p_communicator) in (type(None), P2PCommunicator)
        if not is_known or self.adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "a p2p_communicator of its own kind and adjust_tensor_shapes_fn change the messages between stages, "
                "which our schedules fix in advance; run this model with Megatron's own schedule"
            )
        if self.config.num_microbatches_with_partial_activation_checkpoints is not None:
            raise ValueError(
                "num_microbatches_with_partial_activation_checkpoints counts whole micro-batches in flight, but our "
                "schedules hold segments; unset it, or run this model with Megatron's own schedule"
            )

    @property
    def is_alone(self) -> bool:
        """Whether the pipeline is this rank, which may then run without the others."""
        return self.placement.num_ranks == 1

    @property
    def batch_size(self) -> int:
        """Sequences of a micro-batch by the call; 0 if Megatron leaves that out because no message is sent."""
        return self.micro_batch_size or 0

    @property
    def device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    @property
    def shape(self) -> Shape:
        return Shape.of(self.placement, [len(segments) for segments in self.segments])

    @property
    def longest_lengths(self) -> tuple[int, ...]:
        """The lengths of the segments of the longest micro-batch, for whose costs a step is planned."""
        longest = max(self.segments, key=lambda segments: (len(segments), segments[0].sequence_length))
        return tuple(segment.length for segment in longest)

    @property
    def common_lengths(self) -> tuple[int, ...] | None:
        """The lengths of the segments of every micro-batch; None where micro-batches are cut differently."""
        cuts = {tuple(segment.length for segment in segments) for segments in self.segments}
        return cuts.pop() if len(cuts) == 1 else None

    @property
    def most_tokens(self) -> int:
        """The tokens that a context-parallel rank has of the largest micro-batch."""
        pairs = zip(self.num_sequences, self.segments, strict=True)
        largest = max(number * segments[0].sequence_length for number, segments in pairs)
        return largest // self.groups.cp.size()

    def length_of(self, microbatch: int) -> int:
        """Tokens of a sequence of a micro-batch: those of its segments, or of the call where it is not cut yet."""
        return self.segments[microbatch][0].sequence_length if self.segments else self.seq_length

    def autocast(self) -> AbstractContextManager:
        """The context in which Megatron runs a program's forward step."""
        if self.config.enable_autocast:
            return torch.autocast("cuda", dtype=self.config.autocast_dtype)
        return nullcontext()


def chunks_of(model: torch.nn.Module | list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The model chunks of a rank, which Megatron passes bare if there is one."""
    return model if isinstance(model, list) else [model]


def pipeline_of(p2p_communicator: Any, groups: ProcessGroupCollection | None) -> dist.ProcessGroup:
    """The ranks of the pipeline that a call is for, by its arguments."""
    if isinstance(p2p_communicator, P2PCommunicator):
        return p2p_communicator.pp_group
    if groups is not None:
        return groups.pp
    return parallel_state.get_pipeline_model_parallel_group()


def default_groups() -> ProcessGroupCollection:
    """The groups of a schedule that is given none, as Megatron's own schedules make them."""
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        embd=parallel_state.get_embedding_group(check_initialized=False),
        pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tp_dp_cp=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )


def refuse_waits(config: Any, pipeline: dist.ProcessGroup) -> None:
    """Raise ValueError for settings that make the host wait for the whole GPU within a step: with NCCL a receive posted
    ahead occupies the GPU until its message arrives, which may depend on later actions of this rank."""
    if pipeline.size() == 1 or dist.get_backend(pipeline) != "nccl":
        return
    if getattr(config.timers, "_log_level", 0) > 1:
        name = "--timing-log-level 2"
    elif os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        name = "CUDA_LAUNCH_BLOCKING"
    else:
        return
    raise ValueError(
        f"{name} makes the host wait for a GPU that waits for messages, so the first step would not end; drop it, and "
        "take --pipeline-trace for the times of actions"
    )
