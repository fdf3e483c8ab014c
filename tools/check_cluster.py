#!/usr/bin/env python
"""Look at the ranks of a job, the links between them and the machines under them, and give a verdict.

Started by scripts/check_cluster.sh, under Slurm or torchrun; ends with code 1 if something would stop a training.
"""

import argparse
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

REPETITIONS = 5
LEAST_OPEN_FILES = 4096
LEAST_SHARED_MEMORY = 1 << 30  # of the workers that load data
# The oldest driver for each major version of CUDA; newer minor versions of CUDA run on it, too.
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


class Facts(NamedTuple):
    """What one rank finds on its machine; `troubles` would stop a training, `notes` make it slower."""

    host: str
    device: str
    versions: str
    next_rank: float  # bytes/s of a message to the next rank
    all_ranks: float  # bytes/s of an all-reduce, as nccl-tests counts the bus
    troubles: tuple[str, ...]
    notes: tuple[str, ...]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where checkpoints go; default: here")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the messages; default: 64")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=2))
    troubles, notes = looked_at(args.folder, device, rank)
    facts = Facts(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        versions=versions(),
        next_rank=message_speed(device, args.megabytes << 20, troubles),
        all_ranks=all_reduce_speed(device, args.megabytes << 20, troubles),
        troubles=tuple(troubles),
        notes=tuple(notes),
    )
    gathered: list[Facts] = [facts] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    troubles = verdict(gathered)
    if rank == 0:
        print(report(gathered, troubles), flush=True)
    dist.destroy_process_group()
    return 1 if troubles else 0


def versions() -> str:
    """The versions that must be equal on all ranks."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "missing"

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {of('megatron-core')}, "
        f"megatron-seq1f1b {of('megatron-seq1f1b')}, transformer-engine {of('transformer-engine')}, NCCL {nccl}"
    )


def looked_at(folder: Path, device: torch.device, rank: int) -> tuple[list[str], list[str]]:
    """Troubles and notes of the machine under a rank."""
    troubles = []
    notes = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".check-{rank}-") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        troubles.append(f"--folder {folder} cannot be written: {error.strerror}")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < LEAST_OPEN_FILES:
        notes.append(f"ulimit -n is below {LEAST_OPEN_FILES}, which many workers and ranks exceed")
    if Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").total < LEAST_SHARED_MEMORY:
        notes.append("/dev/shm has less than 1 GiB: start containers with --ipc=host")
    if device.type == "cpu":
        hidden = hidden_gpus(driver(), torch.version.cuda, torch.__version__)
        (troubles if hidden else notes).append(hidden or "no GPU is visible; gloo was tried instead of NCCL")
    elif torch.cuda.mem_get_info(device)[0] < 0.9 * torch.cuda.mem_get_info(device)[1]:
        notes.append("another process holds more than a tenth of the GPU's memory")
    return troubles, notes


def driver() -> str | None:
    """The version of the driver, if it has a GPU on this machine."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.split("\n")[0].strip() or None if found.returncode == 0 else None


def hidden_gpus(installed: str | None, cuda: str | None, torch_version: str) -> str | None:
    """Why PyTorch, built for `cuda`, sees no GPU where the driver `installed` has one; None where there is none."""
    if installed is None:
        return None
    found = f"nvidia-smi lists GPUs (driver {installed}), but PyTorch {torch_version} sees none"
    if cuda is None:
        return f"{found}: it is built for CPUs; install one that is built for CUDA"
    least = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    if least is not None and tuple(map(int, installed.split(".")[:2])) < least:
        needed = ".".join(map(str, least))
        return f"{found}: CUDA {cuda} needs driver {needed} or later; update it, or install a PyTorch for an older CUDA"
    return f"{found}: look at CUDA_VISIBLE_DEVICES, and at the devices of the container"


def message_speed(device: torch.device, size: int, troubles: list[str]) -> float:
    """From every rank to the next at once, as in a pipeline."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    if world == 1:
        return 0.0
    sent = torch.full((size // 4,), float(rank), device=device)
    received = torch.empty_like(sent)

    def ring() -> None:
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + 1) % world),
                dist.P2POp(dist.irecv, received, (rank - 1) % world),
            ]
        )
        for message in work:
            message.wait()

    seconds = timed(ring, device)
    if not bool((received == (rank - 1) % world).all()):
        troubles.append("a message arrived changed")
    return size / seconds


def all_reduce_speed(device: torch.device, size: int, troubles: list[str]) -> float:
    world = dist.get_world_size()
    values = torch.ones(size // 4, device=device)
    dist.all_reduce(values)
    if not bool((values == world).all()):
        troubles.append("an all-reduce gave a wrong sum")
    seconds = timed(lambda: dist.all_reduce(values), device)
    return 2 * (world - 1) / world * size / seconds


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, after a first one that connects the ranks."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    function()
    wait()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(REPETITIONS):
        function()
    wait()
    return (time.perf_counter() - start) / REPETITIONS


def verdict(ranks: Sequence[Facts]) -> list[str]:
    """What would stop a training, a sentence each."""
    troubles = [
        f"rank {rank} on {facts.host}: {trouble}" for rank, facts in enumerate(ranks) for trouble in facts.troubles
    ]
    for name in ("versions", "device"):
        counted = Counter(getattr(facts, name) for facts in ranks)
        usual = counted.most_common(1)[0][0]
        troubles += (
            f"rank {rank} on {facts.host} has {getattr(facts, name)}; the others have {usual}"
            for rank, facts in enumerate(ranks)
            if getattr(facts, name) != usual
        )
    if "megatron-core 0.19" not in ranks[0].versions:
        troubles.append(f"megatron-core 0.19 is needed: {ranks[0].versions}")
    return troubles


def report(ranks: Sequence[Facts], troubles: Sequence[str]) -> str:
    hosts = Counter(facts.host for facts in ranks)
    lines = [
        f"{len(ranks)} ranks on {len(hosts)} machines, {ranks[0].device}",
        ranks[0].versions,
        f"message to the next rank: {words([facts.next_rank for facts in ranks])}",
        f"all-reduce over all ranks: {words([facts.all_ranks for facts in ranks])}",
    ]
    notes = Counter(note for facts in ranks for note in facts.notes)
    lines += (f"note: {note} ({count} of {len(ranks)} ranks)" for note, count in notes.items())
    lines += (f"trouble: {trouble}" for trouble in troubles)
    lines.append("verdict: not ready" if troubles else "verdict: ready")
    return "\n".join(lines)


def words(speeds: Sequence[float]) -> str:
    """The slowest speed and its rank, which show a bad link."""
    slowest = min(range(len(speeds)), key=speeds.__getitem__)
    return f"{speeds[slowest] / 1e9:.2f} GB/s (rank {slowest}) to {max(speeds) / 1e9:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
