"""Checkpoints of Megatron's training loop: what is said when one cannot be saved or loaded.

Tested in functional_tests/test_checkpoints.py by test_losses_go_on.
"""

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...process.patches import PatchTable, wrapping
from ...process.ranks import warn_on_rank_0


class Checkpoints:
    """Wraps functions that save and load; `args()` returns Megatron's arguments."""

    def __init__(self, args: Callable[[], Namespace]) -> None:
        self._args = args

    def patches(self) -> PatchTable:
        training = "megatron.training.training"
        metadata = "megatron.core.dist_checkpointing.load_content_metadata"
        return (
            wrapping(f"{training}.save_checkpoint_and_time", self.save, "names no folder if it fails, and needs one"),
            wrapping(f"{training}.load_checkpoint", self.load, "exits with code 0 if it cannot load"),
            wrapping(metadata, self.metadata, "takes any optimizer's state"),
        )

    def save(self, upstream: Callable, iteration: int, *rest: Any, **more: Any) -> None:
        """Megatron's loop saves after a loss that is not a number, even without --save."""
        folder = self._args().save
        if folder is None:
            warn_on_rank_0(f"nothing is saved of iteration {iteration}, since --save is not given")
            return
        try:
            upstream(iteration, *rest, **more)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            last = Path(folder, "latest_checkpointed_iteration.txt")
            free = shutil.disk_usage(folder).free / 2**20
            complete = last.read_text().strip() if last.is_file() else "none"
            kept = f"the last complete one is {complete}; {folder} has {free:.0f} MiB free"
            error.add_note(f"the checkpoint of iteration {iteration} was not saved; {kept}")
            raise

    def load(self, upstream: Callable, *rest: Any, **more: Any) -> Any:
        """Megatron prints the reason and exits with code 0 for some bad checkpoints."""
        try:
            return upstream(*rest, **more)
        except SystemExit as error:
            folder = self._args().load or self._args().pretrained_checkpoint
            raise RuntimeError(f"Megatron cannot load {folder}; what it printed last is the reason") from error

    def metadata(self, upstream: Callable, *rest: Any, preloaded_state_dict: Any, **more: Any) -> Any:
        """Raises ValueError for a checkpoint of a run with the distributed optimizer if this run is without it, or the
        other way round: the state of the optimizer is saved in another form."""
        args = self._args()
        content = upstream(*rest, preloaded_state_dict=preloaded_state_dict, **more)
        saved = preloaded_state_dict.get("args")
        if content is None or saved is None or args.no_load_optim or args.finetune or saved.no_save_optim:
            return content
        is_saved_with = "distrib_optim_sharding_type" in content
        is_loaded_with = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
        if is_saved_with != is_loaded_with:
            with_it = "with" if is_saved_with else "without"
            change = "add" if is_saved_with else "drop"
            raise ValueError(
                f"the checkpoint in {args.load} was saved {with_it} --use-distributed-optimizer; {change} that flag, "
                "or go on from the weights with --no-load-optim"
            )
        return content
