"""The rank of this process, warnings of one rank only, and what ranks tell one another: outcomes and plans."""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any


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


def check_agreement(plan: str, group: Any = None) -> None:
    """Raise ValueError on all ranks of a process group, by default of the world, if their plans differ: the step would
    hang, or compute something else."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    plans: list[str] = [plan] * len(ranks)
    dist.all_gather_object(plans, plan, group=group)
    usual, _ = Counter(plans).most_common(1)[0]
    others = [f"rank {rank} has {other}" for rank, other in zip(ranks, plans, strict=True) if other != usual]
    if others:
        raise ValueError(
            f"the ranks disagree on what to run: {'; '.join(others)}; the other ranks have {usual}. Start all ranks "
            "with the same flags and files"
        )
