"""The end of a training by a loss or gradient that Megatron rejects, such as NaN.

Megatron computes such a step a second time, and leaves with an exit code and log lines of its state machine; with
--rerun-mode disabled it raises an error at once.

Tested in functional_tests/test_training_features.py by test_a_rejected_loss_ends_with_a_sentence.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core import rerun_state_machine

from ...process.patches import PatchTable, wrapping
from ...process.ranks import is_rank_0
from ...process.sentences import say

_OF_MEGATRON = "Unexpected result "  # in the words of its error


class UnexpectedResults:
    """`args()` returns the arguments of Megatron's training loop."""

    def __init__(self, args: Callable[[], Namespace]) -> None:
        self._args = args

    def patches(self) -> PatchTable:
        train = "megatron.training.training.train"
        return (wrapping(train, self.train, "leaves after a rejected loss without a way out"),)

    def train(self, upstream: Callable, *args: Any, **more: Any) -> Any:
        """Raises ValueError for a rejected loss if Megatron does not compute it again."""
        try:
            return upstream(*args, **more)
        except SystemExit as left:
            if is_rank_0() and (sentence := self._sentence(left.code)):
                say(sentence)
            raise
        except RuntimeError as error:
            if _OF_MEGATRON not in str(error):
                raise
            raise ValueError(f"{error}; {self._way_out()}") from error

    def _sentence(self, code: Any) -> str:
        """What the exit code says, with the way out; empty for other codes."""
        step = (
            f"the loss or a gradient of iteration {self._args().curr_iteration + 1} is NaN, infinite or far too large"
        )
        if code == rerun_state_machine.EXIT_CODE_FAILED_ON_RESULT_VALIDATION:
            return (
                f"{step}, but not when it is computed again: a GPU may be faulty, that of the rank in the log above; "
                f"go on from the last checkpoint without it (exit code {code})"
            )
        if code == rerun_state_machine.EXIT_CODE_RESUME_TO_DISAMBIGUATE:
            return f"{step}, and again when it is computed once more: {self._way_out()} (exit code {code})"
        return ""

    def _way_out(self) -> str:
        return (
            f"lower --lr {self._args().lr:g}, and look at --init-method-std, --norm-epsilon, --rotary-base and the "
            "data; docs/troubleshooting.md has more under 'The loss is NaN or infinite'"
        )
