"""Checkpoints of Megatron's training loop: what is said when one cannot be saved or loaded.

Tested in functional_tests/test_checkpoints.py by test_losses_go_on.
"""

import errno
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...process.flag_names import flag_of
from ...process.patches import PatchTable, wrapping
from ...process.ranks import warn_on_rank_0

_LATEST = "latest_checkpointed_iteration.txt"
_LITTLE = 2**20  # bytes that are left where a disk is full
_NONE = -1  # Megatron's number for an iteration that was looked for, and not found


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
            last = Path(folder, _LATEST)
            free = shutil.disk_usage(folder).free
            complete = last.read_text().strip() if last.is_file() else "none"
            kept = f"the last complete one is {complete}; {folder} has {free / 2**20:.0f} MiB free"
            lost = f"the checkpoint of iteration {iteration} was not saved; {kept}"
            # A writer's error comes as "Worker failure", without what the system said.
            if free < _LITTLE or any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
                goes_on = f", and --load {folder}" if last.is_file() else ""
                raise ValueError(
                    f"--save {folder} is full: {lost}; make room, or give another folder to --save{goes_on}"
                ) from error
            error.add_note(lost)
            raise

    def load(self, upstream: Callable, *rest: Any, **more: Any) -> Any:
        """Megatron prints the reason and exits with code 0 for some bad checkpoints, and trains random weights without
        one. That is as it should be where --load and --save name one folder, which the first start of a job finds
        empty."""
        from megatron.training.checkpointing import get_loaded_iteration  # not before all patches are bound

        args = self._args()
        folder = args.load or args.pretrained_checkpoint
        try:
            result = upstream(*rest, **more)
        except SystemExit as error:
            if get_loaded_iteration() == _NONE:
                raise ValueError(f"--load {folder} holds no checkpoint: {_what_is_in(folder)}") from error
            raise RuntimeError(f"Megatron cannot load {folder}; what it printed last is the reason") from error
        if args.load is not None and get_loaded_iteration() == _NONE and result[0] == 0:
            is_first_start = Path(args.load) == Path(args.save or "") and not _iterations_in(args.load)
            if not is_first_start:
                warn_on_rank_0(
                    f"--load {args.load} holds no checkpoint, so training starts from random weights: "
                    f"{_what_is_in(args.load)}. --exit-on-missing-checkpoint makes this an error."
                )
        return result

    def metadata(self, upstream: Callable, *rest: Any, preloaded_state_dict: Any, **more: Any) -> Any:
        """Raises ValueError for a checkpoint of a run with the distributed optimizer if this run is without it, or the
        other way round, of one of another optimizer, and of one with experts on several ranks if this run has none
        there: the state of the optimizer is saved in another form."""
        args = self._args()
        content = upstream(*rest, preloaded_state_dict=preloaded_state_dict, **more)
        saved = preloaded_state_dict.get("args")
        if content is None or saved is None or args.no_load_optim or args.finetune or saved.no_save_optim:
            return content
        names = ["optimizer"]
        if "muon" in args.optimizer:
            names.append("muon_scalar_optimizer")
        for name in names:
            saved_name = getattr(saved, name, None)
            if saved_name not in (None, getattr(args, name, saved_name)):
                raise ValueError(
                    f"the checkpoint in {args.load} was saved with {flag_of(name)} {saved_name}; give that, or go on "
                    "from the weights with --no-load-optim"
                )
        is_saved_with = "distrib_optim_sharding_type" in content
        is_loaded_with = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
        if is_saved_with != is_loaded_with:
            with_it = "with" if is_saved_with else "without"
            change = "add" if is_saved_with else "drop"
            raise ValueError(
                f"the checkpoint in {args.load} was saved {with_it} --use-distributed-optimizer; {change} that flag, "
                "or go on from the weights with --no-load-optim"
            )
        saved_size = getattr(saved, "expert_model_parallel_size", 1)
        if args.num_experts and (saved_size > 1) != (args.expert_model_parallel_size > 1):
            way_out = "give more than 1" if saved_size > 1 else "give 1"
            raise ValueError(
                f"the checkpoint in {args.load} was saved with --expert-model-parallel-size {saved_size}, and this run "
                f"has {args.expert_model_parallel_size}; {way_out}, or go on from the weights with --no-load-optim"
            )
        return content


def _iterations_in(folder: str) -> list[Path]:
    """The folders of single checkpoints in that of --load, in the order of their iterations."""
    return sorted(path for path in Path(folder).glob("iter_*") if re.fullmatch(r"iter_\d+", path.name))


def _what_is_in(folder: str) -> str:
    """What the folder of --load has in place of a checkpoint, and the way out if there is one."""
    place = Path(folder).absolute()
    number = re.fullmatch(r"iter_(\d+)", place.name)
    if number is not None and place.is_dir():
        return f"it is one itself; give --load {place.parent} --ckpt-step {int(number[1])}"
    if iterations := _iterations_in(folder):
        last = int(iterations[-1].name.removeprefix("iter_"))
        return f"it has {iterations[-1].name}, but no {_LATEST}; --ckpt-step {last} loads that one"
    return f"it has no {_LATEST}" if place.is_dir() else "there is no such folder"
