"""Both launchers train the tiny model on the CPU, the sbatch file in a Slurm of one node; errors."""

import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN, SBATCH = "scripts/pretrain_gpt.sh", "scripts/slurm/pretrain_gpt.sbatch"
ITERATIONS = 4
BINARIES = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
SBIN_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where Debian keeps daemons


def environment(**settings: str) -> dict[str, str]:
    """The environment of a launcher: this Python, and none of the variables that it would obey."""
    obeyed = r"MODEL_SIZE|GPUS_PER_NODE|DEVICE|DATA_PATH|TP|PP|SEQUENCE_.*|TRAIN_ITERS|CUDA_.*|SLURM_.*|SBATCH_.*"
    clean = {name: value for name, value in os.environ.items() if not re.fullmatch(obeyed, name)}
    return clean | {"PATH": SBIN_PATH, "PYTHON": sys.executable} | settings


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]


def assert_trained(log: str) -> None:
    found = losses(log)
    assert len(found) == ITERATIONS, log[-3000:]
    assert all(map(math.isfinite, found)) and found[-1] < found[0], found
    assert "[after training is done]" in log


@pytest.fixture(scope="module")
def torchrun_log() -> str:
    run = subprocess.run(
        ["bash", TORCHRUN, "--train-iters", str(ITERATIONS)],
        cwd=ROOT, env=environment(MODEL_SIZE="tiny"), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    return run.stdout


def test_torchrun_launcher_trains(torchrun_log):
    assert_trained(torchrun_log)


def test_sbatch_launcher_trains_the_same(slurm, torchrun_log):
    log = slurm / "job.log"
    outcome = submit(slurm, SBATCH, log, cwd=ROOT, seconds=240)
    assert outcome == "COMPLETED 0:0", log.read_text()[-3000:]
    assert_trained(log.read_text())
    assert losses(log.read_text()) == pytest.approx(losses(torchrun_log), abs=1e-5)


def test_sbatch_away_from_the_repository_says_what_to_do(slurm, tmp_path):
    log = slurm / "away.log"
    assert submit(slurm, str(ROOT / SBATCH), log, cwd=tmp_path, seconds=60) == "FAILED 1:0"
    assert log.read_text() == f"error: {tmp_path} is not the repository: submit from its root, or set REPOSITORY.\n"


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"MODEL_SIZE": "5b"}, "MODEL_SIZE=5b is unknown: take tiny, 2.7b, 7b, 13b or 30b."),
        ({"GPUS_PER_NODE": "3"}, "not a multiple of TP=1 x PP=2"),
        ({"MODEL_SIZE": "30b", "GPUS_PER_NODE": "8"}, "make 8 processes, which is not a multiple of TP=8 x PP=8"),
        ({"MODEL_SIZE": "7b", "GPUS_PER_NODE": "none"}, "set GPUS_PER_NODE, or try MODEL_SIZE=tiny"),
        ({"PYTHON": "no/such/python"}, "PYTHON=no/such/python does not run: run bash scripts/setup.sh"),
        ({"DATA_PATH": "no/such/data"}, "there is no no/such/data.idx"),
        ({"PRECISION": "fp4"}, "PRECISION=fp4 is unknown"),
        ({"TP": "x"}, "TP=x is not a positive integer."),
        ({"PP": "0"}, "PP=0 is not a positive integer."),
        ({"SEQUENCE_SPLITS": "-4"}, "SEQUENCE_SPLITS=-4 is not a positive integer."),
        ({"TRAIN_ITERS": "1e3"}, "TRAIN_ITERS=1e3 is not a positive integer."),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(settings, sentence):
    run = subprocess.run(
        ["bash", TORCHRUN], cwd=ROOT, env=environment(**settings), capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and run.stdout == ""
    assert sentence in run.stderr and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


def test_shellcheck():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch")]
    assert len(scripts) >= 3
    run = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout


# --------------------------------------------------------------------------------- a Slurm of one node


@pytest.fixture(scope="module")
def slurm():
    """The folder of a running Slurm whose only node is this machine; everything in it ends with the test."""
    require_slurm()
    with ExitStack() as stack:
        # Not pytest's folder: munge wants one that every user may enter, with a short name.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        configure(folder)
        munge = folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log")]
        start(stack, folder, "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        wait_for(folder, "munge's socket", (munge / "socket").exists)
        start(stack, folder, "slurmctld", "-D")
        start(stack, folder, "slurmd", "-D")
        wait_for(folder, "an idle node", lambda: ask(folder, "sinfo", "-h", "-o", "%t") == "idle")
        stack.callback(cancel_all, folder)
        yield folder


def require_slurm() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start munged, slurmctld and slurmd")
    missing = [name for name in BINARIES if shutil.which(name, path=SBIN_PATH) is None]
    if missing and os.environ.get("CI") == "true" and shutil.which("apt-get"):
        quiet = {"capture_output": True, "env": environment(DEBIAN_FRONTEND="noninteractive")}
        subprocess.run(["apt-get", "update"], timeout=120, **quiet)
        packages = ["slurmctld", "slurmd", "slurm-client", "munge"]
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *packages], timeout=240, **quiet)
        missing = [name for name in BINARIES if shutil.which(name, path=SBIN_PATH) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")


def configure(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    control, node = free_ports(2)
    (folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=10 State=UP
""")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def slurm_environment(folder: Path) -> dict[str, str]:
    return environment(MODEL_SIZE="tiny", SLURM_CONF=str(folder / "slurm.conf"))


def start(stack: ExitStack, folder: Path, *command: str) -> None:
    """Start a daemon, that the stack stops."""
    with open(folder / f"{command[0]}.log", "w") as log:
        daemon = subprocess.Popen(command, env=slurm_environment(folder), stdout=log, stderr=log)
    stack.callback(stop, daemon)


def stop(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(15)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def ask(folder: Path, *command: str) -> str:
    run = subprocess.run(command, env=slurm_environment(folder), capture_output=True, text=True, timeout=20)
    return run.stdout.strip()


def wait_for(folder: Path, what: str, is_there: Callable[[], bool], seconds: int = 30) -> None:
    until = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > until:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-1000:]}" for log in folder.glob("*.log"))
            pytest.fail(f"no sign of {what} after {seconds} s\n{logs}")
        time.sleep(0.2)


def cancel_all(folder: Path) -> None:
    """Leave no job behind, whose processes would outlive the daemons."""
    if ask(folder, "squeue", "-h"):
        ask(folder, "scancel", "--full", f"--user={os.geteuid()}")
        wait_for(folder, "an empty queue", lambda: not ask(folder, "squeue", "-h"))


def submit(folder: Path, script: str, log: Path, cwd: Path, seconds: int) -> str:
    """Run a job to its end: its state and its exit code, as Slurm writes them."""
    command = ["sbatch", "--parsable", f"--output={log}", script, "--train-iters", str(ITERATIONS)]
    run = subprocess.run(command, cwd=cwd, env=slurm_environment(folder), capture_output=True, text=True, timeout=60)
    assert run.stdout.strip().isdigit(), run.stderr
    job = run.stdout.strip()
    # Not sbatch --wait, which looks only every ten seconds.
    wait_for(folder, f"the end of job {job}", lambda: not ask(folder, "squeue", "-h", "-j", job), seconds)
    return " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", ask(folder, "scontrol", "show", "job", job)))
