"""Starts the programs of the GPU suite, and judges what they found.

A section is given a `Suite` of its own with the moment at which its time is over. What its programs found until then
counts, and the rest is not run, which is no failure; ranks that hang fail before.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost")
VERDICTS = {None: "not judged", True: "ok", False: "FAILED"}
NOT_RUN = "not run: "
OUT_OF_TIME = f"{NOT_RUN}time"
TIMED_OUT = 124  # of the program `timeout`
TO_END = 45  # seconds for a program that is told to; torchrun kills ranks that have not ended after 30
# A line with the type and the words of an exception, after the rank that PyTorch puts before it.
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*)$", re.MULTILINE)
# Relative; bf16 rounds to 3 digits, and fp32 sums differ in their order.
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
# Of norms of gradients in bf16. A unit whose gradients are lost or counted twice changes them by more.
NORM_TOLERANCE = 3e-2


@dataclass
class Found:
    """Checks and figures, as `common.Report` writes them."""

    checks: list[dict] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    def __add__(self, other: "Found") -> "Found":
        return Found(self.checks + other.checks, self.figures + other.figures)

    def check(self, name: str, passed: bool | None, found: str) -> None:
        self.checks.append(check(name, passed, found))


class Ended(NamedTuple):
    """A process: why it did not end well, or None, and what it printed."""

    problem: str | None
    log: str


class Cores:
    """The cores of this machine. A process takes one for each of its ranks, when those that came before have theirs."""

    def __init__(self, number: int) -> None:
        self._number = self._free = number
        self._waiting: list[object] = []
        self._changed = Condition()

    @contextmanager
    def taken(self, ranks: int) -> Iterator[None]:
        number = min(ranks, self._number)
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._waiting[0] is turn and self._free >= number)
            self._waiting.remove(turn)
            self._free -= number
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += number
                self._changed.notify_all()


@dataclass
class Suite:
    """Starts processes on `cores`, until `until` of the monotonic clock; their logs and results lie in `folder`."""

    device: str
    tiny: bool
    folder: Path
    cores: Cores
    until: float
    environment: dict[str, str] = field(default_factory=dict)

    def program(
        self, name: str, *flags: str, ranks: int = 0, queues: int = 1, output: str = "", limit: float | None = None
    ) -> Found:
        """What one of the programs beside this file found; under torchrun where `ranks` are asked for.

        `queues` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) are shared by the streams of a process. `output` tells
        apart results of one program. No more than `limit` seconds, if there is one.
        """
        stem = f"{name}-{output}" if output else name
        path = self.folder / f"{stem}.json"
        path.unlink(missing_ok=True)  # of an earlier run of the suite
        start = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        command = [*start, str(HERE / f"{name}.py"), "--device", self.device, "--output", str(path)]
        if self.tiny:
            command.append("--tiny")
        ended = self.process(stem, [*command, *flags], ranks=max(1, ranks), queues=queues, limit=limit)
        found = Found(**json.loads(path.read_text())) if path.exists() else Found()
        if ended.problem:
            found.check(" ".join([f"{name}.py", *flags]), passed_of(ended.problem), ended.problem)
        return found

    def process(
        self, name: str, command: Sequence[str], ranks: int = 1, queues: int = 1, limit: float | None = None
    ) -> Ended:
        """Run a command on as many cores as it has `ranks`; its log lies in the folder under `name`."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | self.environment
        environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        log = self.folder / f"{name}.log"
        with self.cores.taken(ranks):
            left = self.until - time.monotonic()
            if left <= 0:
                return Ended(OUT_OF_TIME, "")
            left = min(left, limit or left)
            # torchrun is told to end its ranks, which have process groups of their own: it kills those that stay.
            limited = ["timeout", f"--kill-after={TO_END}", str(left), *command]
            with log.open("w") as file:
                print(*command, file=file, flush=True)
                code = subprocess.run(limited, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        text = log.read_text(errors="replace").partition("\n")[2]
        if code == TIMED_OUT or (code and time.monotonic() > self.until):
            return Ended(OUT_OF_TIME, text)
        return Ended(f"exit code {code}: {reason_in(text)}" if code else None, text)

    def beside(self, *calls: Callable[[], Any]) -> list[Any]:
        """The results of calls that start processes, which run side by side as far as cores are free."""
        with ThreadPoolExecutor(len(calls)) as threads:
            return [each.result() for each in [threads.submit(call) for call in calls]]


def reason_in(log: str) -> str:
    """The first error that a failed process printed; torchrun's own, about its ranks, comes later."""
    error = ERROR.search(log)
    if error is None:
        return " ".join(log.strip().splitlines()[-3:])[-400:]
    return error[1][:400]


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def check(name: str, passed: bool | None, found: str) -> dict:
    return {"name": name, "passed": passed, "found": found}


def passed_of(problem: str) -> bool | None:
    """The verdict on a process that did not end well."""
    return None if problem == OUT_OF_TIME else False


def verdict(found: dict) -> str:
    return "not run" if found["found"].startswith(NOT_RUN) else VERDICTS[found["passed"]]


def agree(name: str, ours: list[float], own: list[float], tolerance: float) -> dict:
    """The check that numbers of consecutive steps are those of Megatron's own run."""
    if not own or len(ours) != len(own):
        return check(name, False, f"{len(ours)} numbers, {len(own)} of Megatron's own")
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, own, strict=True))
    found = f"{worst:.1e} apart, of {tolerance:.0e} allowed, over {len(own)} steps from {own[0]:.4f} to {own[-1]:.4f}"
    return check(name, worst <= tolerance, found)
