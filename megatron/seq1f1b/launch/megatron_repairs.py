"""Faults of Megatron itself, which every process mends.

Tested in process/test_child_processes.py by test_what_a_rank_starts_ends_with_it.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..platform import cpu
from ..process.child_processes import start_process
from ..process.patches import Patch, wrapping


def repairs(version: str) -> list[Patch]:
    """The patches of this version of megatron-core."""
    from ..platform import without_te
    from .training_loop import optimizer_state

    def compile_unless_shipped(compile_helpers: Callable[[], None]) -> None:
        if find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    def queue(get_queue: Callable[[str], Any], mp_mode: str | None = None) -> Any:
        # A spawned Python imports Megatron and the script again, but with CUDA a fork is not safe.
        return get_queue(mp_mode or ("fork" if cpu.is_active() else "spawn"))

    rows = [
        wrapping(
            "megatron.core.datasets.utils.compile_helpers",
            compile_unless_shipped,
            "fails in a wheel, which ships them compiled",
        ),
        wrapping(
            "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
            queue,
            "starts a new Python, which imports all again, on the CPU, too",
        ),
        wrapping(
            "multiprocessing.process.BaseProcess.start", start_process, "starts processes that outlive a killed rank"
        ),
        *optimizer_state.repairs(version),
    ]
    if not cpu.is_active():  # whose patches include the repairs
        rows += without_te.repairs()
    return rows
