"""A Slurm of two nodes on this machine: each slurmd has a network namespace and a host name of its own."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launch import ROOT, free_port
from support.launchers import SBIN_PATH, environment
from support.patience import patient

NODES = ("node1", "node2")
NETWORK = f"198.18.{os.getpid() % 256}"  # reserved for tests; another for each cluster of a machine
BINARIES = (
    *("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel"),
    *("ip", "unshare"),
)

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({network}.254)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort=16818
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%h.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=30 State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """Jobs on the running cluster; the folder holds its state and the logs."""

    folder: Path

    def environment(self, **settings: str) -> dict[str, str]:
        own = {"MODEL_SIZE": "tiny", "SLURM_CONF": str(self.folder / "slurm.conf")}
        return environment(**own | settings)

    def ask(self, *command: str) -> str:
        run = subprocess.run(command, env=self.environment(), stdout=subprocess.PIPE, text=True, timeout=60)
        return run.stdout.strip()

    def submit(self, script: str, log: Path, *words: str, cwd: Path = ROOT, options=(), **settings: str) -> str:
        """The id of a new job with the arguments `words`."""
        command = ["sbatch", "--parsable", f"--output={log}", *options, script, *words]
        env = self.environment(LOG_DIR=f"{log}.ranks") | settings
        return subprocess.check_output(command, cwd=cwd, env=env, text=True, timeout=60).strip()

    def state(self, job: str) -> str:
        """The state of a job and its exit code, as Slurm writes them; nothing if Slurm does not answer."""
        return " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", self.ask("scontrol", "show", "job", job)))

    def outcome(self, job: str, seconds: int) -> str:
        """Wait for the end of a job: its state and its exit code."""
        # Not sbatch --wait, which looks only every ten seconds.
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(f"the end of job {job}", lambda: self.state(job).startswith(ends), seconds)
        return self.state(job)

    def requeue(self, job: str) -> None:
        """Start a job again, running or ended, without the two minutes that Slurm holds it back."""
        self.ask("scontrol", "requeue", job)
        self.wait_for("a requeued job", lambda: self.state(job).startswith("PENDING"))
        # A node refuses a job whose credential is of the second in which it ended that job ("credential revoked").
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        self.wait_for("a new start", lambda: self.state(job).startswith("RUNNING"))

    def wait_for(self, what: str, is_there: Callable[[], object], seconds: int = 60) -> None:
        until = time.monotonic() + patient(seconds)
        while not is_there():
            if time.monotonic() > until:
                logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                pytest.fail(f"no sign of {what} after {seconds} s\n{logs}")
            time.sleep(0.2)

    def cancel_all(self) -> None:
        """Leave no job behind, whose processes would outlive the daemons."""
        if self.ask("squeue", "-h"):
            self.ask("scancel", "--full", f"--user={os.geteuid()}")
            self.wait_for("an empty queue", lambda: not self.ask("squeue", "-h"))


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster; everything in it ends with the context. Skips where its parts are missing."""
    require_slurm()
    with ExitStack() as stack:
        # Not pytest's folder: munge wants one that every user may enter, with a short name.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        configure(folder)
        namespaces = network(stack)
        cluster = Cluster(folder)
        munge = folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log")]
        start(stack, cluster, "munged", "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        cluster.wait_for("munge's socket", (munge / "socket").exists)
        start(stack, cluster, "slurmctld", "slurmctld", "-D")
        hosts = [f"{NETWORK}.{i} {node}\n" for i, node in enumerate(NODES, 1)]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
        for node, namespace in zip(NODES, namespaces, strict=True):
            # Not `ip netns exec`, which hides the control groups that slurmd looks for.
            inside = ("nsenter", f"--net=/run/netns/{namespace}", "unshare", "--uts", "--mount")
            setup = f"mount --bind {folder}/hosts /etc/hosts && hostname {node} && exec slurmd -D"
            start(stack, cluster, node, *inside, "bash", "-c", setup)
        states = ["idle"] * len(NODES)
        cluster.wait_for("idle nodes", lambda: cluster.ask("sinfo", "-h", "-N", "-o", "%t").split() == states)
        stack.callback(cluster.cancel_all)
        yield cluster


def require_slurm() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start munged, slurmctld and slurmd")
    missing = [name for name in BINARIES if shutil.which(name, path=SBIN_PATH) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge iproute2)")


def network(stack: ExitStack) -> list[str]:
    """The namespaces of the nodes, on a bridge with this machine, while the stack lasts."""
    bridge = f"seqbr{os.getpid() % 100000}"
    names = [f"{bridge}-{node}" for node in NODES]
    if ip("link", "add", bridge, "type", "bridge") != 0:
        pytest.skip("network namespaces cannot be made here")
    stack.callback(ip, "link", "del", bridge)
    ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
    ip("link", "set", bridge, "up")
    for i, name in enumerate(names, 1):
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        end = f"{bridge}.{i}"
        ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", end, "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{NETWORK}.{i}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
    return names


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], env=environment(), capture_output=True, timeout=20).returncode


def configure(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={NETWORK}.{i} CPUs={os.cpu_count()} State=UNKNOWN" for i, node in enumerate(NODES, 1)
    )
    host = socket.gethostname().split(".")[0]
    text = CONFIGURATION.format(host=host, network=NETWORK, port=free_port(), folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)


def start(stack: ExitStack, cluster: Cluster, name: str, *command: str) -> None:
    """Start a daemon, which ends with the stack."""
    with open(cluster.folder / f"{name}.log", "w") as log:
        daemon = subprocess.Popen(command, env=cluster.environment(), stdout=log, stderr=log)
    stack.callback(daemon.wait)
    stack.callback(daemon.kill)
