"""The rank of this process, warnings of one rank only, and what ranks tell one another: outcomes and plans."""

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from .step_failure import leave_note


def rank() -> int:
    """The number of this process in its job; known before torch.distributed starts."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_rank_0() -> bool:
    return rank() == 0


def warn_on_rank_0(message: str) -> None:
    """Log a sentence once in a job, as a warning, which Python shows even before logging is set up."""
    if is_rank_0():
        logging.getLogger("megatron.seq1f1b").warning(message)


class Outcome:
    """What `make()` returned on this rank, or its error, in a form that can be sent to other ranks: they must not wait
    for an object that a rank could not make."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: Exception | None = None
        self._words = ""
        try:
            self._result = make()
        except Exception as error:
            self._error = error
            is_sentence = isinstance(error, ValueError)
            self._words = str(error) if is_sentence else "".join(traceback.format_exception(error))

    def __getstate__(self) -> dict[str, Any]:
        error = self._error
        if error is not None:  # which may not be pickled
            error = ValueError(self._words) if isinstance(error, ValueError) else RuntimeError(self._words)
        return {"_result": self._result, "_error": error, "_words": self._words}

    def result(self) -> Any:
        """The result of `make()`; raises its error, on other ranks a ValueError or a RuntimeError with its words."""
        if self._error is not None:
            raise self._error
        return self._result


def results_on_all_ranks[T](make: Callable[[], T], what: str, group: Any = None) -> list[T]:
    """What `make()` returns on each rank of a process group, by default of the world; call it on all of them. The error
    of one is raised on all, so that none goes on and waits for it. `what` is prepared is noted for the case that the
    wait for all ranks fails, which ends with the timeout of the group."""
    import torch.distributed as dist

    group = group or dist.group.WORLD
    if group.size() == 1:
        return [make()]
    here = f"rank {dist.get_rank()}"
    leave_note(f"{here} prepares {what}")
    own = Outcome(make)
    leave_note(f"{here} waits for all ranks to prepare {what}")
    begin = time.monotonic()
    outcomes = [own] * group.size()
    try:
        dist.all_gather_object(outcomes, own, group=group)
    except RuntimeError:
        leave_note(f"{here} waited {time.monotonic() - begin:.0f} s in vain for all ranks to prepare {what}")
        raise
    leave_note("")
    outcomes[group.rank()] = own  # whose error has its traceback
    return [outcome.result() for outcome in outcomes]


def check_agreement(make_plan: Callable[[], str], what: str, group: Any = None) -> str:
    """The plan of all ranks of a process group, by default of the world, in words. Raises ValueError on all of them if
    their plans differ, since the step would hang, or compute something else, and the error of `make_plan()` on one."""
    import torch.distributed as dist

    plans = results_on_all_ranks(make_plan, what, group)
    usual, _ = Counter(plans).most_common(1)[0]
    if len(set(plans)) > 1:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        others = [f"rank {rank} has {other}" for rank, other in zip(ranks, plans, strict=True) if other != usual]
        raise ValueError(
            f"the ranks disagree on what to run: {'; '.join(others)}; the other ranks have {usual}. Start all ranks "
            "with the same flags and files"
        )
    return usual
