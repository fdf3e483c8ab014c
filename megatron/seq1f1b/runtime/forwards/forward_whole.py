"""Whole micro-batches: a program's forward step runs as in Megatron's own schedules.

Tested in functional_tests/test_contract.py by test_no_pipeline.
"""

from megatron.core.pipeline_parallel.schedules import check_first_val_step, forward_step
from torch import Tensor

from ...model import Segment, SegmentContext
from ..model_calls.call import data_ended
from ..program_contract import ProgramContract
from ..step import Step
from .loss import Losses


class WholeForwards:
    """Runs the program's forward step with its loss, once for each micro-batch and model chunk, for steps that cut
    nothing. Any forward step that Megatron takes will do."""

    def __init__(self, step: Step, context: SegmentContext, losses: Losses, contract: ProgramContract) -> None:
        self._step = step
        self._context = context
        self._losses = losses
        self._contract = contract
        self._started_chunks: set[int] = set()

    def forward(self, stage: int, segment: Segment, input_tensor: Tensor | None, moves: bool) -> Tensor:
        """As `Forwards.forward`, for the only segment of a micro-batch; the scalar of the last stage is the loss."""
        step = self._step
        microbatch = segment.microbatch
        chunk = step.placement.chunk_of(stage)
        is_first_of_chunk = chunk not in self._started_chunks
        self._started_chunks.add(chunk)
        unit = stage, microbatch, segment.index
        keeps_for_backward = not step.forward_only
        running = self._context.running(segment, keeps_for_backward, unit, moves)
        with running, self._contract.around_program(stage, segment.sequence_length):
            try:
                output, num_tokens = forward_step(
                    step.forward_step_func,
                    step.iterators[chunk],
                    step.chunks[chunk],
                    step.num_microbatches,
                    input_tensor,
                    self._losses.reports_of[microbatch],
                    step.config,
                    cp_group_size=step.groups.cp.size(),
                    collect_non_loss_data=step.collect_non_loss_data,
                    is_first_microbatch=check_first_val_step(step.first_val_step, step.forward_only, is_first_of_chunk),
                    current_microbatch=microbatch,
                    vp_stage=chunk if len(step.chunks) > 1 else None,
                    is_last_stage=stage == step.placement.num_stages - 1,
                )
            except StopIteration as error:
                raise data_ended(f"micro-batch {microbatch}") from error
        self._losses.count(num_tokens)
        return output

    def loss_gradient(self, output: Tensor, segment: Segment) -> None:
        """A loss goes backward by itself."""

    def end_backward(self, stage: int, segment: Segment) -> None:
        """The graph of a micro-batch holds the program's own computation, too."""

    def assert_empty(self) -> None:
        """There is nothing that could outlive a step."""
