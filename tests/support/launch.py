"""Start a training script on several ranks of this machine's CPU, and read its log."""

import inspect
import json
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "pretrain_gpt.py"

# One thread a rank: the ranks share the cores, and the order of sums does not change. No GPU: these
# are tests of the CPU, wherever they run.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""} | dict.fromkeys(THREADS, "1")

ITERATIONS = 3
# A GPT that trains in a tenth of a second an iteration, and as well on 1, 2 or 4 ranks.
TINY_GPT = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(ITERATIONS), "--lr", "1e-3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--make-vocab-size-divisible-by", "64", "--num-workers", "0"),
    *("--log-interval", "1", "--eval-iters", "0"),
)


@dataclass(frozen=True)
class Job:
    """A finished job: the exit code (0 if every rank ended well), what all ranks printed, and the code of each."""

    code: int
    log: str
    codes: tuple[int, ...] = ()

    def losses(self, kind: str = "lm loss") -> list[float]:
        """The training losses (or ``kind="lm loss value"``: the validation losses), in order."""
        return [float(value) for value in re.findall(rf"\b{kind}: (\S+) \|", self.log)]

    def check(self) -> "Job":
        """This job, if it ended well."""
        assert self.code == 0, f"exit code {self.code}; the end of the log:\n{self.log[-6000:]}"
        return self


def torchrun(script: Path, ranks: int, flags: Sequence = (), timeout=180, env: dict | None = None, options=()) -> Job:
    """Run ``script`` under torchrun, as a user does; `options` are torchrun's own."""
    command = ["timeout", "--kill-after=60", str(patient(timeout)), sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--local-addr", "localhost", *options, f"--nproc-per-node={ranks}"]
    command += [str(script), *map(str, flags)]
    # A file, not a pipe, which the manager of a checkpoint holds open after its rank was killed.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT | (env or {})).returncode
        log.seek(0)
        return Job(code, log.read())


class Launcher:
    """Runs jobs in forks of one process that has imported Megatron already (see zygote.py).

    `packages` are folders of further packages for their ranks. `last` is the last job.
    """

    last: Job

    def __init__(self, logs: Path, packages: Sequence[Path] = ()):
        self._logs = logs
        self._jobs = 0
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("zygote.py"))]
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": python_path(ROOT, ROOT / "tests", *packages)}
        self._zygote = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(
        self, ranks: int, flags: Sequence = (), script=PRETRAIN, timeout=120, env: dict | None = None, watched=True
    ) -> Job:
        """Run ``script`` on ``ranks`` ranks, as torchrun would; one job at a time.

        With `watched` off nothing ends the other ranks when one has failed.
        """
        self._jobs += 1
        log = self._logs / f"{self._jobs}.log"
        log.write_text("")
        job = {"script": str(script), "ranks": ranks, "flags": [*map(str, flags)], "env": env or {}, "log": str(log)}
        job |= {"timeout": patient(timeout), "watched": watched, "port": free_port()}
        self._zygote.stdin.write(json.dumps(job) + "\n")
        self._zygote.stdin.flush()
        codes = json.loads(self._zygote.stdout.readline())
        # The code of a rank that failed, not of those that were ended because of it.
        code = next((code for code in codes if code > 0), min(codes))
        self.last = Job(code, log.read_text(errors="replace"), tuple(codes))
        return self.last

    def call(self, ranks: int, function: Callable, timeout: float = 120, **arguments: object) -> list:
        """What a function of a file of tests returns on each rank, in a process group of gloo's."""
        file = self._logs / f"{self._jobs + 1}.call"
        path = Path(inspect.getfile(function)).relative_to(ROOT / "tests")
        file.write_bytes(pickle.dumps((".".join(path.with_suffix("").parts), function.__name__, arguments)))
        self(ranks, [file], Path(__file__).with_name("on_ranks.py"), timeout).check()
        return [pickle.loads(file.with_suffix(f".{rank}").read_bytes()) for rank in range(ranks)]

    def close(self) -> None:
        """Its ranks end with it."""
        self._zygote.kill()
        self._zygote.communicate()


def python_path(*folders: Path) -> str:
    """PYTHONPATH for other processes: these folders, then those of this process, one of which may have Megatron
    (`pip install --target`)."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """Not one of those that the kernel gives to others, which start between this call and the use of the port."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("localhost", random.SystemRandom().randrange(10_000, 30_000)))
            return listener.getsockname()[1]
