"""What the programs of the GPU suite share: flags, reports, clocks, and process groups."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.seq1f1b.platform import cpu

if "cpu" in sys.argv:
    cpu.activate()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

GIB = 2**30


def parser(doc: str | None) -> argparse.ArgumentParser:
    """`--device` and `--tiny`, which makes every size small enough for a CPU, and `--output`, a JSON."""
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found.add_argument("--tiny", action="store_true")
    found.add_argument("--output", type=Path, required=True)
    return found


@dataclass
class Report:
    """Checks and figures of one program, written after each, so that a time limit loses none. A figure is written
    before it is judged."""

    path: Path
    checks: list[dict] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    def check(self, name: str, passed: bool | None, found: str) -> None:
        """`passed` is None for goals of speed and memory where sizes are tiny."""
        self.checks.append({"name": name, "passed": passed if passed is None else bool(passed), "found": found})
        self._write()

    def figure(self, table: str, **values: Any) -> None:
        """A row of a table of docs/measured.md, or of none."""
        self.figures.append({"table": table, **values})
        self._write()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A check `name` that fails if the body raises; the checks after it are made."""
        try:
            yield
        except Exception as error:
            first_line, *_ = str(error).splitlines() or [""]
            self.check(name, False, f"{type(error).__name__}: {first_line}")

    def _write(self) -> None:
        unfinished = self.path.with_suffix(".unfinished")  # the time may be up in the middle of it
        unfinished.write_text(json.dumps({"checks": self.checks, "figures": self.figures}, indent=1))
        unfinished.replace(self.path)


def seconds(device: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """How long `work` takes until the device is done with it, and its result."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def dtype_of(device: str) -> torch.dtype:
    """In which speed is measured."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def patience(device: str) -> timedelta:
    """How long ranks wait for each other: less than a section takes, so that one that hangs fails."""
    return timedelta(seconds=30 if device == "cuda" else 120)


def use_own_or_shared_gpu() -> None:
    """Make the GPU of this rank the current one; ranks share GPUs if there are more ranks."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def start_megatron(device: str, backend: str = "gloo", chunks: int = 1, expert_parallel: bool = False) -> None:
    """Megatron's groups: of this process alone, or of the ranks that torchrun started, as one pipeline or as replicas
    that share their experts."""
    timeout = patience(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timeout, **alone)
    parallel_state.initialize_model_parallel(
        1,
        1 if expert_parallel else dist.get_world_size(),
        expert_model_parallel_size=dist.get_world_size() if expert_parallel else 1,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    model_parallel_cuda_manual_seed(1)
