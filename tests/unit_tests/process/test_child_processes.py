"""What a rank starts ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.seq1f1b.launch.megatron_repairs import repairs
from support.patience import patient

# It starts processes in every way, and prints their numbers.
PARENT = """
import multiprocessing, time
from megatron.seq1f1b.process.patches import patched, wrapping
from megatron.seq1f1b.process.child_processes import start_process

if __name__ == "__main__":
    patched([wrapping("multiprocessing.process.BaseProcess.start", start_process, "")])
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_rank_starts_ends_with_it(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        children = [int(parent.stdout.readline()) for _ in range(3)]
        parent.kill()
    deadline = time.monotonic() + patient(30)
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child for child in children if is_running(child)]
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left
    assert "multiprocessing.process.BaseProcess.start" in {row.target for row in repairs("0.19.2")}


def is_running(process: int) -> bool:
    """Not gone, and not a zombie that nobody has waited for."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
