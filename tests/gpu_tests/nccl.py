"""Several ranks on one GPU over NCCL: which of its settings work here.

NCCL 2.30 and later allow it by NCCL_MULTI_RANK_GPU_ENABLE=1. Which transport then works depends on the machine, so
settings are tried one after the other. Without MPS, the service that lets processes share a GPU at the same time, ranks
take turns on it: slow, but the order of messages and whether anything hangs are those of ranks with a GPU each.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch  # noqa: F401 - which loads NCCL

from gpu_tests.suite import Found, Suite

FIRST_VERSION = (2, 30, 0)  # that lets ranks share a GPU
LIMIT = 25.0  # seconds of an attempt; a CPU that tests share takes longer
LIMIT_ON_A_CPU = 250.0
ENABLED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
NO_PEERS = ENABLED | {"NCCL_P2P_DISABLE": "1"}
SOCKETS = NO_PEERS | {"NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
MPS = "nvidia-cuda-mps-control"


class Settings(NamedTuple):
    name: str
    environment: dict[str, str]
    needs_mps: bool = False


LADDER = (
    Settings("NCCL's own choice", ENABLED),
    Settings("no peer-to-peer copies", NO_PEERS),
    Settings("sockets", SOCKETS),
    Settings("NCCL's own choice, under MPS", ENABLED, needs_mps=True),
    Settings("sockets, under MPS", SOCKETS, needs_mps=True),
)


def version() -> tuple[int, int, int] | None:
    """Of the NCCL that this process runs, which may not be the one that PyTorch was built with."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one that is loaded, by its name
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    return major, rest // 100, rest % 100


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """A daemon of MPS of our own while inside: the environment of its clients, or None where it cannot be started."""
    if shutil.which(MPS) is None:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="mps_")  # sockets lie in it, whose paths have to be short
    environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}

    def control(*flags: str, words: str = "") -> bool:
        try:
            command = [MPS, *flags]
            ended = subprocess.run(command, input=words, text=True, env=os.environ | environment, timeout=20)
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0

    starts = control("-d")
    try:
        yield environment if starts else None
    finally:
        if starts:
            control(words="quit\n")
        shutil.rmtree(folder, ignore_errors=True)


def working(suite: Suite, of_mps: dict[str, str] | None, backend: str) -> tuple[dict[str, str] | None, Found]:
    """The environment of the first settings with which two ranks exchange messages, or None; and all attempts."""
    found = Found()
    limit = LIMIT if suite.device == "cuda" else LIMIT_ON_A_CPU
    for number, settings in enumerate(LADDER):
        environment = settings.environment
        if settings.needs_mps:
            if of_mps is None:
                continue
            environment = environment | of_mps
        attempt = replace(suite, environment=environment).program(
            "nccl_probe", "--backend", backend, ranks=2, output=str(number), limit=limit
        )
        works = bool(attempt.checks) and all(check["passed"] for check in attempt.checks)
        why = "; ".join(check["found"] for check in attempt.checks)
        found.figures.append({"table": "nccl", "settings": settings.name, "works": works, "found": why, **environment})
        if works:
            return environment, found
    return None, found
