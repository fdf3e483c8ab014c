"""Iterations of --iterations-to-skip as steps that only read their data.

Megatron reads them from one iterator, which stages with several chunks or without data do not have, and leaves out all
that follows a step: with the saves of the last iterations, the checkpoint of a whole run.

Tested in functional_tests/test_training_features.py by test_skipped_iterations_read_and_save.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size, get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from ...process.patches import PatchTable, wrapping


class SkippedIterations:
    """`args()` returns the arguments of Megatron's training loop. Iterations count from 1."""

    def __init__(self, args: Callable[[], Namespace]) -> None:
        self._args = args
        self._numbers: frozenset[int] = frozenset()

    def __contains__(self, iteration: object) -> bool:
        return iteration in self._numbers

    def patches(self) -> PatchTable:
        training = "megatron.training.training"
        return (
            wrapping(f"{training}.train", self.train, "skips saves and evaluations with an iteration"),
            wrapping(f"{training}.train_step", self.train_step, "has no step that only reads"),
        )

    def train(self, upstream: Callable, *args: Any, **more: Any) -> Any:
        parsed = self._args()
        self._numbers = frozenset(parsed.iterations_to_skip)
        parsed.iterations_to_skip = []
        try:
            return upstream(*args, **more)
        finally:
            parsed.iterations_to_skip = sorted(self._numbers)

    def train_step(
        self,
        upstream: Callable,
        forward_step_func: Callable,
        data_iterator: Any,
        *args: Any,
        iteration: int,
        **more: Any,
    ) -> tuple:
        if iteration + 1 not in self:
            return upstream(forward_step_func, data_iterator, *args, iteration=iteration, **more)
        of_chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for iterator in of_chunks:
                if iterator is None:  # of a chunk without data
                    continue
                for _ in range(get_num_microbatches()):
                    next(iterator)
        self._args().skipped_train_samples += get_current_running_global_batch_size()
        no_losses: dict[str, Any] = {}
        is_skipped = 1
        saves = False
        exits = False
        exit_code = 0
        gradient_norm = None
        num_zeros = None
        largest_logit = None
        return no_losses, is_skipped, saves, exits, exit_code, gradient_norm, num_zeros, largest_logit
