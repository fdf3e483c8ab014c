"""The loss of a micro-batch from the losses of its segments.

Megatron divides the loss sum of a micro-batch by its number of unmasked tokens; a mean of segment means would be wrong.
All segments of a micro-batch have gone forward when its first backward starts, so the division waits until then.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor
from torch.utils._pytree import tree_map

from ..model import Segment

_log = logging.getLogger(__name__)

_OF_SEGMENTS = "with --sequence-splits its report has to be a dictionary of the same numbers for every segment"


class LossLedger:
    """Token counts, reports and checks of one step, by micro-batch; each rank of `context_parallel` has a share of the
    tokens of every segment."""

    def __init__(self, per_token_loss: bool, context_parallel: dist.ProcessGroup | None = None) -> None:
        self._per_token_loss = per_token_loss
        self._context_parallel = context_parallel
        self._num_shares = 1 if context_parallel is None else context_parallel.size()
        self._of_micro_batches: dict[int, Tensor] = {}
        # By micro-batch and message: the results of segments, the function that rejects one, and `validate_result`.
        self._checks: dict[tuple[int, str], tuple[list[Tensor], Callable, Callable]] = {}
        self._num_tokens: dict[int, list[Tensor]] = defaultdict(list)
        # The lists to which Megatron's forward_step appends the reports of segments.
        self.reports_of: dict[int, list[Any]] = defaultdict(list)
        # The loss of each part as its function returned it, and the entries of reports that share its memory: Megatron
        # divides it in place.
        self._losses: dict[int, list[Tensor]] = defaultdict(list)
        self._of_the_loss: set[Any] = set()
        self._are_outputs = False

    def observe(self, forward_step_func: Callable, segment: Segment) -> Callable:
        """`forward_step_func` with a loss that is not yet divided by its token count."""

        def observed(*args: Any) -> tuple[Any, Callable | None]:
            output, loss_func = forward_step_func(*args)
            self._are_outputs |= loss_func is None
            return output, loss_func and partial(self._loss, loss_func, segment)

        return observed

    def _loss(self, loss_func: Callable, segment: Segment, output: Any, **kwargs: Any) -> Any:
        microbatch = segment.microbatch
        with self._checks_put_off(microbatch):
            result = loss_func(output, **kwargs)
        if kwargs.get("non_loss_data"):
            self._are_outputs = True
            return result
        if len(result) == 3:
            loss, num_tokens, report = result
            self._num_tokens[microbatch].append(torch.as_tensor(num_tokens))
            if self._is_whole(segment):
                return result
            if not isinstance(report, dict):
                raise ValueError(f"the loss function reports a {type(report).__name__}; {_OF_SEGMENTS}")
            self._losses[microbatch].append(loss.detach().clone())
            tensors = {name: value for name, value in report.items() if isinstance(value, Tensor)}
            memory = loss.untyped_storage().data_ptr()
            self._of_the_loss |= {name for name, each in tensors.items() if each.untyped_storage().data_ptr() == memory}
            return loss, torch.ones_like(num_tokens), report
        if not segment.is_whole_sequence:
            raise ValueError(
                "the loss function returns (loss, report), an average of unknown weight; with --sequence-splits it has "
                "to return (loss sum, number of tokens, report)"
            )
        return result

    @contextmanager
    def _checks_put_off(self, microbatch: int) -> Iterator[None]:
        """Inside, `validate_result` of Megatron's rerun state machine keeps tensors for `make_up_checks`."""
        machine = get_rerun_state_machine()

        def validate_result(result: Any, rejection_func: Callable, message: str, **options: Any) -> None:
            check = partial(type(machine).validate_result, machine, message=message, **options)
            if isinstance(result, Tensor):
                made = self._checks.setdefault((microbatch, message), ([], rejection_func, check))
                made[0].append(result.detach().clone())  # Megatron divides the loss in place
            else:
                check(result, rejection_func)

        machine.validate_result = validate_result
        try:
            yield
        finally:
            del machine.validate_result

    def make_up_checks(self) -> None:
        """Run Megatron's checks of losses (NaN, infinity, jumps) once for each micro-batch, on the sum over its
        segments, whose losses vary more; a check waits for the GPU, so all come at the end of a step."""
        for (microbatch, message), (results, rejects, check) in self._checks.items():
            check(sum(results), partial(_is_rejected, f"{message} in micro-batch {microbatch}", results, rejects))

    def ready_for_backward(self, loss: Tensor, segment: Segment) -> Tensor:
        """The loss of a segment, divided by the tokens of its whole micro-batch unless the step sums per token."""
        microbatch = segment.microbatch
        if self._is_whole(segment) or self._per_token_loss or microbatch not in self._num_tokens:
            return loss
        if microbatch not in self._of_micro_batches:
            num_tokens = torch.stack(self._num_tokens[microbatch]).sum(dim=0)
            if self._num_shares > 1:
                dist.all_reduce(num_tokens, group=self._context_parallel)
            self._of_micro_batches[microbatch] = torch.clamp(num_tokens, min=1)
        if self._num_shares > 1:  # Megatron averages gradients over context-parallel ranks
            loss = loss * self._num_shares
        return loss / self._of_micro_batches[microbatch]

    def _is_whole(self, segment: Segment) -> bool:
        return segment.is_whole_sequence and self._num_shares == 1

    def total_num_tokens(self, device: torch.device) -> Tensor:
        """Unmasked tokens of all micro-batches; zero where no loss is computed."""
        counts = [*chain(*self._num_tokens.values())] or [torch.zeros([], dtype=torch.int, device=device)]
        return torch.stack(counts).sum(dtype=torch.int).to(device)

    def reports(self) -> list[Any]:
        """One report per micro-batch, in order."""
        return [self._merged(microbatch) for microbatch in sorted(self.reports_of) if self.reports_of[microbatch]]

    def _merged(self, microbatch: int) -> Any:
        """Megatron's report of the whole micro-batch; outputs are joined in order."""
        reports = self.reports_of[microbatch]
        if self._are_outputs:
            return reports[0] if len(reports) == 1 else tree_map(_joined, *reports)
        if microbatch not in self._losses:
            return reports[0]
        merged = {}
        for name in dict.fromkeys(chain(*reports)):
            try:
                dtype = torch.float64 if isinstance(reports[0][name], float) else None  # as Python computes
                values = torch.stack([torch.as_tensor(report[name], dtype=dtype).view(-1) for report in reports])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"the loss function reports {name!r}, which is no number; {_OF_SEGMENTS}") from error
            is_number = values.shape[1] == 1
            merged[name] = self._number(name, values[:, 0], microbatch) if is_number else values.sum(dim=0)
        return merged

    def _number(self, name: Any, values: Tensor, microbatch: int) -> Tensor:
        """A number of a micro-batch from those of its parts: a sum if it is the loss, else a mean over tokens. The
        choice is made on the device, so the host does not wait."""
        weights = torch.stack(self._num_tokens[microbatch]).to(values)
        if name in self._of_the_loss:
            return values.sum() if self._per_token_loss else values.sum() / weights.sum().clamp(min=1)
        mean = (values * weights).sum() / weights.sum().clamp(min=1)
        are_losses = values == torch.stack(self._losses[microbatch]).view(-1).to(values)
        return torch.where(are_losses.all(), values.sum(), mean)


def _joined(*outputs: Any) -> Any:
    """Outputs [b, n, ...] joined along the tokens; anything else as a list."""
    are_cut = all(isinstance(output, Tensor) and output.dim() > 1 for output in outputs)
    return torch.cat(outputs, dim=1) if are_cut else list(outputs)


def _is_rejected(place: str, results: list[Tensor], rejects: Callable, total: Tensor) -> Any:
    is_rejected = rejects(total)
    if is_rejected:
        _log.error("%s, whose segments have %s", place, torch.stack(results).tolist())
    return is_rejected
