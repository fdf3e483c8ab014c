"""The launch scripts: what they would start is shown by a stand-in for Python."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.launch import ROOT
from support.patience import patient

SBIN_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where Debian keeps daemons
OBEYED = (
    r"DRY_RUN|WORLD_SIZE|MODEL|MODEL_SIZE|SCRIPT|CHUNKS|GPUS_PER_NODE|DEVICE|DATA_PATH|TP|PP|SEQUENCE_.*|TRAIN_ITERS|"
    r"CUDA_.*|PYTORCH_.*|SLURM_.*|SBATCH_.*"
)
# Python, but for training scripts, whose command it prints.
STAND_IN = f"""#!/usr/bin/env bash
case "$*" in
    *pretrain_*.py*) echo "started: ${{WORLD_SIZE:-0}} ${{*@Q}}" ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


def environment(**settings: str) -> dict[str, str]:
    """The environment of a launcher: none of the variables that it would obey but those given."""
    clean = {name: value for name, value in os.environ.items() if not re.fullmatch(OBEYED, name)}
    return clean | {"PATH": SBIN_PATH} | settings


def run(command: list, *, cwd: Path = ROOT, timeout: float = 60, **settings: str) -> subprocess.CompletedProcess[str]:
    """A launcher with nothing but these settings in its environment."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment(**{"PYTHON": sys.executable} | settings),
        timeout=patient(timeout),
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Start:
    """What a launcher starts: so many ranks of a script; `world_size` is that of a rehearsal, or 0."""

    script: Path
    ranks: int
    flags: list[str]
    world_size: int


def started(command: list, folder: Path, *, cwd: Path = ROOT, **settings: str) -> Start:
    """What a launcher would start; the stand-in is in the folder."""
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    done = run(command, cwd=cwd, **settings | {"PYTHON": str(python)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (line,) = re.findall(r"^started: (.*)$", done.stdout, re.MULTILINE)
    world_size, *words = shlex.split(line)
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    ranks = int(words[place - 1]) if place else 1
    return Start(
        script=ROOT / words[place],
        ranks=ranks,
        flags=words[place + 1 :],
        world_size=int(world_size),
    )
