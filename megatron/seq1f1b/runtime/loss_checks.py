"""Megatron's checks of the loss (NaN, infinity, jumps), once for a micro-batch, at the end of a step.

A check reads a number on the host, which has to wait for the GPU. And it is meant for the loss of a whole micro-batch:
that of a segment varies more.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor

from ..model import Segment

_log = logging.getLogger(__name__)


class _Check(NamedTuple):
    segment: Segment
    result: Tensor
    rejection_func: Callable[[Tensor], Any]
    options: dict[str, Any]


class LossChecks:
    """The checks of one step."""

    def __init__(self) -> None:
        self._put_off: dict[tuple[int, str], list[_Check]] = defaultdict(list)  # by micro-batch and message

    @contextmanager
    def of(self, segment: Segment) -> Iterator[None]:
        """Inside, a loss function runs for `segment`, and `validate_result` of Megatron's rerun state machine waits."""
        machine = get_rerun_state_machine()

        def put_off(result: Any, rejection_func: Callable, message: str, **options: Any) -> None:
            if isinstance(result, Tensor):
                # A copy: Megatron divides the loss in place.
                check = _Check(segment, result.detach().clone(), rejection_func, options)
                self._put_off[segment.microbatch, message].append(check)
            else:
                type(machine).validate_result(machine, result, rejection_func, message, **options)

        machine.validate_result = put_off
        try:
            yield
        finally:
            del machine.validate_result

    def make_up(self) -> None:
        """Make all checks, each for the sum over the segments of a micro-batch.

        Raises what `validate_result` raises, with the segments that were rejected.
        """
        for (microbatch, message), checks in self._put_off.items():
            _make_up(f"{message} in micro-batch {microbatch}", message, checks)


def _make_up(place: str, message: str, checks: list[_Check]) -> None:
    last, notes = checks[-1], [message]

    def rejects(total: Tensor) -> Any:
        is_rejected = last.rejection_func(total)
        if is_rejected:
            found = [check.segment.index for check in checks if check.rejection_func(check.result)]
            notes[:] = [f"{place}, of its segments in {found or 'the sum'}"]
            _log.error("%s", notes[0])
        return is_rejected

    try:
        total = sum(check.result for check in checks)
        get_rerun_state_machine().validate_result(result=total, rejection_func=rejects, message=message, **last.options)
    except Exception as error:
        error.add_note(notes[0])
        raise
