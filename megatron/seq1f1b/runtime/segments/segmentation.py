"""The segments of the sequences of a step, and the starts of the documents in them.

Tested in functional_tests/test_programs.py by test_a_program_trains_as_with_whole_sequences.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ...model import Documents, Segment, differs, starts_of_documents
from ...process.ranks import Outcome
from ..gradients.partitioned_state import is_partitioned
from ..model_calls.call_arguments import Arguments, bounds_of, size_of
from ..model_calls.calls import Calls
from ..step import Step


class MicroBatch(NamedTuple):
    """The sizes of a micro-batch: its sequences, their length in tokens, and the documents that are packed in them."""

    num_sequences: int
    length: int
    documents: Documents | None = None


class CutFunction(Protocol):
    """Gives the lengths in tokens of the segments of a sequence, first to last."""

    def __call__(
        self, sequence_length: int, documents: Documents | None = None, num_segments: int | None = None, /
    ) -> Sequence[int]:
        """The lengths may follow the `documents` of the micro-batch; there are as many as usual if `num_segments` is
        None. Only micro-batches whose sizes come from calls are cut with these two."""


class StepDocuments(NamedTuple):
    """The micro-batches of a training step, and the lengths in tokens of all documents in them."""

    num_microbatches: int
    lengths: list[int]


# The micro-batches by the program's calls on the first stage; the same on all ranks of the pipeline.
ReadCalls = Callable[[Step, Calls], list[MicroBatch]]


class Segmentation:
    """How the micro-batches of a step are cut: by default not at all, for sequences of the length that the step is
    called with.

    - `num_segments`: segments of every micro-batch; None if micro-batches differ in their number.
    - `cut`: the lengths of the segments, unless there is one.
    - `from_calls`: the length and the documents of a micro-batch are those of the program's call of the model on the
      first stage. All calls of a step are then started before it is cut and scheduled.
    - `from_variable_calls`: the same in steps of models with `variable_seq_lengths`.
    - `segments_for(longest, shortest)`: the number of segments of a micro-batch from a call, by its length; if all
      replicas need the same number, by the longest and the shortest of their micro-batches. Without it `num_segments`.
    - `packed`: documents are kept apart even if the call names none. They begin where `position_ids` start anew, or
      after a token `end_of_document`. `documents_of_step` then holds those of the last training step.
    - `read_calls`: reads micro-batches from calls; a rehearsal, whose tokens have no values, gives its own.
    """

    def __init__(
        self,
        num_segments: int | None = 1,
        cut: CutFunction = lambda *_: (),
        packed: bool = False,
        end_of_document: int | None = None,
        from_calls: bool = False,
        from_variable_calls: bool = False,
        segments_for: Callable[[int, int], int] | None = None,
        read_calls: ReadCalls | None = None,
    ) -> None:
        self.num_segments = num_segments
        self.packed = packed
        self.end_of_document = end_of_document
        self._from_calls = from_calls or packed
        self._from_variable_calls = from_variable_calls
        self.documents_of_step: StepDocuments | None = None
        self._cut = cut
        self._segments_for = segments_for
        self._read_calls = read_calls or self._read_microbatches

    @property
    def cuts_sequences(self) -> bool:
        return self.num_segments != 1

    @property
    def follows_segments(self) -> bool:
        """Whether attention is that of segments; if not, the model keeps its own, which reads masks."""
        return self.cuts_sequences or self.packed

    def reads_calls(self, config: Any) -> bool:
        """Whether the program's calls of a model with this configuration tell the sizes of the micro-batches. One
        program may have models whose lengths vary, and others."""
        varies = getattr(config, "variable_seq_lengths", False)
        return self._from_calls or (self._from_variable_calls and varies)

    def cuts_every_call(self, step: Step) -> bool:
        """Whether `cut_step` cuts a step anew for the calls that its programs wait at. Those of a reference and of the
        model may then be for sequences of other sizes, or other documents."""
        return self.reads_calls(step.config)

    def lengths(self, sequence_length: int) -> Sequence[int]:
        """Tokens of each segment, first to last, of a micro-batch of a length known before the step."""
        return self._cut(sequence_length) if self.cuts_sequences else (sequence_length,)

    def cut_step(self, step: Step, calls: Calls | None) -> None:
        """Set the segments of a step; it has `calls` if they may tell how."""
        if self.reads_calls(step.config):
            assert calls is not None, "a step is cut by its calls before there are any"
            microbatches = self._read_calls(step, calls)
            numbers = self._numbers_of_segments(step, microbatches)
            cuts = [self._cut_of_call(batch, number) for batch, number in zip(microbatches, numbers, strict=True)]
        else:
            microbatches = [MicroBatch(step.batch_size, step.seq_length)] * step.num_microbatches
            cuts = [self.lengths(step.seq_length)] * step.num_microbatches
        if self.packed and not step.forward_only:
            document_lengths: list[int] = []
            for batch in microbatches:
                document_lengths += _document_lengths(batch)
            self.documents_of_step = StepDocuments(step.num_microbatches, document_lengths)
        step.num_sequences = [batch.num_sequences for batch in microbatches]
        step.segments = [
            segments_of(microbatch, lengths, batch.documents)
            for microbatch, (batch, lengths) in enumerate(zip(microbatches, cuts, strict=True))
        ]

    def reports(self, of_microbatches: list[Any], step: Step) -> list[Any]:
        """The return value of a step."""
        return of_microbatches

    def _read_microbatches(self, step: Step, calls: Calls) -> list[MicroBatch]:
        # The other ranks wait for what the first stage tells, so they must hear of its failure, too.
        starting = Outcome(calls.start_all)

        def on_first_stage() -> list[MicroBatch]:
            starting.result()
            chunk = step.placement.chunk_of(0)
            numbers = range(step.num_microbatches)
            return [self._microbatch_of(calls.at(chunk, number).arguments, number, step) for number in numbers]

        microbatches = on_all_ranks(step, on_first_stage)
        starting.result()
        return microbatches

    def _numbers_of_segments(self, step: Step, microbatches: Sequence[MicroBatch]) -> list[int]:
        """The number of segments of each micro-batch."""
        if not self.cuts_sequences:
            return [1] * len(microbatches)
        if self._segments_for is None:
            assert self.num_segments is not None, "a number of segments, or a function that gives it"
            return [self.num_segments] * len(microbatches)
        if not meets_replicas(step):
            return [self._segments_for(batch.length, batch.length) for batch in microbatches]
        of_replicas: list[Any] = [None] * step.groups.dp.size()
        dist.all_gather_object(of_replicas, [batch.length for batch in microbatches], group=step.groups.dp)
        by_microbatch = zip(*of_replicas, strict=True)
        return [self._segments_for(max(lengths), min(lengths)) for lengths in by_microbatch]

    def _cut_of_call(self, batch: MicroBatch, num_segments: int) -> Sequence[int]:
        if num_segments == 1:
            return (batch.length,)
        return self._cut(batch.length, batch.documents, num_segments)

    def _microbatch_of(self, arguments: Arguments, microbatch: int, step: Step) -> MicroBatch:
        """The sizes of a micro-batch, by the arguments of its call of the model on the first stage."""
        size = size_of(arguments)
        if size is None:
            raise ValueError(
                f"the forward step of micro-batch {microbatch} calls the model on the first stage without data to cut; "
                "pass it tokens [sequences, tokens], or drop --sequence-splits"
            )
        number, length = size
        named = arguments.by_name()
        documents = None
        if self.follows_segments:
            where = f"the attention mask of micro-batch {microbatch}"
            documents = documents_of(named, number, length, where)
            if documents is None and self.packed:
                documents = self._marked_documents(named, number, length, microbatch)
        return MicroBatch(number, length, documents)

    def _marked_documents(self, named: dict[str, Any], number: int, length: int, microbatch: int) -> Documents:
        """Documents of a call that has neither a packed format nor a mask of them."""
        tokens = named.get("input_ids")
        positions = named.get("position_ids")
        starts = torch.zeros(number, length, dtype=torch.bool)
        starts[:, 0] = True
        if self.end_of_document is not None and isinstance(tokens, Tensor):
            starts[:, 1:] = (tokens[:, :-1] == self.end_of_document).cpu()
        elif isinstance(positions, Tensor) and positions.shape[-1] == length:
            starts |= (positions.expand(number, length) == 0).cpu()
        else:
            raise ValueError(
                f"documents are to be kept apart, but the call of the model in micro-batch {microbatch} has neither "
                "packed_seq_params, an attention_mask nor position_ids that start anew; drop --sequence-splits and "
                "--pipeline-schedule to run Megatron's own schedule"
            )
        return _documents_at(starts)


def segments_of(microbatch: int, lengths: Sequence[int], documents: Documents | None) -> list[Segment]:
    """The segments of a micro-batch with sequences cut into `lengths`."""
    return [
        Segment(
            microbatch=microbatch,
            index=index,
            start=end - length,
            end=end,
            sequence_length=sum(lengths),
            documents=documents,
        )
        for index, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True))
    ]


def documents_of(named: dict[str, Any], number: int, length: int, where: str) -> Documents | None:
    """The documents that a call of the model keeps apart, for `number` (b) sequences of `length` (s) tokens, by its
    arguments' names: those of `packed_seq_params`, else of an `attention_mask` [b, 1, s, s], True where hidden. None if
    there is just one. Raises ValueError for a mask that hides anything else; waits for the GPU."""
    packed = named.get("packed_seq_params")
    mask = named.get("attention_mask")
    if isinstance(packed, PackedSeqParams) and packed.qkv_format == "thd":
        if number != 1:
            raise ValueError(
                f"packed_seq_params mark documents in one row of tokens, but the call of the model has {number} rows; "
                "flatten them to one"
            )
        return (tuple(sorted({bound for bound in bounds_of(packed) if bound < length})),)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2 or mask.shape[-2:] != (length, length):
        return None  # of padding, which is checked with every call
    hidden = mask.bool().reshape(-1, length, length).expand(number, length, length)
    if not differs(hidden):
        return None
    return _documents_at(starts_of_documents(hidden, where))


def _documents_at(starts: Tensor) -> Documents:
    return tuple(tuple(row.nonzero().view(-1).tolist()) for row in starts)


def _document_lengths(batch: MicroBatch) -> list[int]:
    """Tokens of each document; where none are told apart, every sequence is one."""
    documents = batch.documents or ((0,),) * batch.num_sequences
    lengths = []
    for starts in documents:
        lengths += [end - start for start, end in pairwise((*starts, batch.length))]
    return lengths


def meets_replicas(step: Step) -> bool:
    """Whether data-parallel replicas exchange something within a step, tokens or the state of chunks; then they need
    equally many segments."""
    return getattr(step.config, "expert_model_parallel_size", 1) > 1 or is_partitioned(step.chunks)


def on_all_ranks(step: Step, make: Callable[[], Any]) -> Any:
    """The result of `make()` on the rank that reads the data, the first tensor-parallel rank of the first stage; its
    error is raised on all ranks."""
    pipeline = step.pipeline
    tensor = step.groups.tp
    first = step.placement.rank_of(0)
    outcomes: list[Any] = [None]
    if step.rank == first and tensor.rank() == 0:
        outcomes = [Outcome(make)]
    if tensor.rank() == 0:
        dist.broadcast_object_list(outcomes, dist.get_global_rank(pipeline, first), group=pipeline)
    dist.broadcast_object_list(outcomes, dist.get_global_rank(tensor, 0), group=tensor)
    (outcome,) = outcomes
    return outcome.result()
