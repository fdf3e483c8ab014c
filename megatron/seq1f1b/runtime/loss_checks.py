"""Megatron's checks of the loss (NaN, infinity, jumps), once for each micro-batch, at the end of a step.

A check reads a number on the host, which waits for the GPU, and it is meant for the loss of a whole micro-batch: that
of a segment varies more.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor

from ..model import Segment

_log = logging.getLogger(__name__)


class LossChecks:
    """The checks of one step."""

    def __init__(self) -> None:
        # By micro-batch and message: the result of each segment, what rejects it, and the call of `validate_result`.
        self._put_off: dict[tuple[int, str], tuple[dict[int, Tensor], Callable, Callable]] = {}

    @contextmanager
    def of(self, segment: Segment) -> Iterator[None]:
        """Inside, calls of `validate_result` of Megatron's rerun state machine for a loss of `segment` are put off."""
        machine = get_rerun_state_machine()

        def put_off(result: Any, rejection_func: Callable, message: str, **options: Any) -> None:
            check = partial(type(machine).validate_result, machine, message=message, **options)
            if isinstance(result, Tensor):
                made = self._put_off.setdefault((segment.microbatch, message), ({}, rejection_func, check))
                made[0][segment.index] = result.detach().clone()  # Megatron divides the loss in place
            else:
                check(result, rejection_func)

        machine.validate_result = put_off
        try:
            yield
        finally:
            del machine.validate_result

    def make_up(self) -> None:
        """Run each check on the sum over the segments of a micro-batch.

        Raises the exception of `validate_result`, with a note that names the rejected segments.
        """
        for (microbatch, message), put_off in self._put_off.items():
            _make_up(f"{message} in micro-batch {microbatch}", *put_off)


def _make_up(place: str, results: dict[int, Tensor], rejects: Callable, check: Callable) -> None:
    notes = []

    def rejects_sum(total: Tensor) -> Any:
        is_rejected = rejects(total)
        if is_rejected:
            found = [index for index, result in results.items() if rejects(result)]
            notes.append(f"{place}, of its segments in {found or 'the sum'}")
            _log.error("%s", notes[0])
        return is_rejected

    try:
        check(sum(results.values()), rejects_sum)
    except Exception as error:
        error.add_note(notes[0] if notes else place)
        raise
