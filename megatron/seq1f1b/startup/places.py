"""Whether a run can write what it is going to write, and has the space for it."""

import math
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..planning.costs import ModelShape
from ..planning.costs.flops import layer_flops


class Place(NamedTuple):
    """A folder that this rank may write to, and the flag that names it."""

    flag: str
    path: Path


def places(args: Namespace, rank: int, local_rank: int, world_size: int) -> Iterator[Place]:
    """What may be written on this rank: the first of each node looks at what any rank of the node may write."""
    flags = []
    if local_rank == 0:
        flags += ["save", "pipeline_trace"]
    if rank == 0:
        flags += ["data_cache_path"]
    if rank == world_size - 1:
        flags += ["tensorboard_dir"]
    for name in flags:
        path = getattr(args, name, None)
        if path and "://" not in str(path):
            yield Place(f"--{name.replace('_', '-')}", Path(path))


def check_writable(place: Place) -> None:
    """Make the folder and a file in it; raises ValueError where that fails."""
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.path) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise ValueError(
            f"{place.flag} {place.path} cannot be written ({error.strerror}); give another folder"
        ) from None


def check_space(place: Place, checkpoint_bytes: int, num_checkpoints: int) -> None:
    """Raise ValueError if fewer than two checkpoints, or all that the run saves, find space."""
    wanted = min(num_checkpoints, 2)
    free = shutil.disk_usage(place.path).free
    if free < wanted * checkpoint_bytes:
        raise ValueError(
            f"{place.flag} {place.path} has {words(free)} free on {mount_point(place.path)}, but "
            f"{'two checkpoints take' if wanted == 2 else 'the checkpoint takes'} about "
            f"{words(wanted * checkpoint_bytes)}; make space or give another folder"
        )


def checkpoint_bytes(args: Namespace, num_parameters: int) -> int:
    """About the size of a checkpoint: the parameters, and with the optimizer fp32 ones and two moments of each."""
    parameter = 2 if args.bf16 or args.fp16 else 4
    if getattr(args, "no_save_optim", None):
        return parameter * num_parameters
    moments = 8 if args.optimizer == "adam" else 4
    return (parameter + moments + (4 if parameter == 2 else 0)) * num_parameters


def num_parameters(model: ModelShape) -> int:
    """Weights of the layers, the embedding and the head; norms and biases are not worth counting."""
    layers = sum(layer_flops(model, layer).per_token // 2 for layer in range(model.num_layers))
    if model.experts is not None:
        idle = (model.experts.total - model.experts.active) * model.experts.ffn_hidden_size
        layers += len(model.expert_layers) * idle * model.hidden_size * (3 if model.is_gated else 2)
    return layers + 2 * model.vocab_size * model.hidden_size


def num_checkpoints(args: Namespace) -> int:
    """How many checkpoints the run saves, the one at its end included."""
    if not args.train_iters or not args.save_interval:
        return 1
    return math.ceil(args.train_iters / args.save_interval)


def mount_point(path: Path) -> Path:
    """Where the file system of a path is mounted."""
    path = path.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def words(size: int) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
