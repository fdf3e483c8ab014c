"""The sbatch file on a Slurm of two nodes. What Slurm and the launcher do is seen with ranks that only count; the
exhaustive tests train."""

import re
import sys
from pathlib import Path

import pytest

from support.slurm_cluster import ROOT, Cluster, running_cluster

SBATCH = "scripts/slurm/pretrain.sbatch"
STAND_IN = str(Path(__file__).parent / "scripts" / "stand_in_rank.sh")


@pytest.fixture(scope="module")
def slurm():
    with running_cluster() as cluster:
        yield cluster


def text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def iterations(log: Path, rank: int) -> list[int]:
    """The numbers of the iterations of a rank, in the order of its log."""
    return [int(number) for number in re.findall(rf"iteration +(\d+)/ on rank {rank}", text(log))]


def test_ranks_of_two_nodes_meet_resume_and_save_in_time(slurm):
    """A requeued job goes on and keeps its log; before the time limit it saves and ends well."""

    def run_until_iteration(number: int) -> None:
        def is_there() -> bool:
            return all((iterations(log, rank) or [0])[-1] >= number for rank in (0, 1))

        slurm.wait_for(f"iteration {number}", is_there)

    log, saved = slurm.folder / "two.log", slurm.folder / "two"
    settings = {"PYTHON": STAND_IN, "GPUS_PER_NODE": "1", "CHECKPOINT_PATH": str(saved)}
    job = slurm.submit(SBATCH, log, options=["--nodes=2", "--time=29", "--signal=TERM@60"], **settings)
    run_until_iteration(2)
    slurm.requeue(job)
    run_until_iteration(int((saved / "rank-0").read_text()) + 2)
    shorten(slurm, job, 40)
    assert slurm.outcome(job, 120) == "COMPLETED 0:0", text(log)
    assert "srun: error" not in text(log).rpartition("REQUEUE")[2], text(log)
    port = 10000 + int(job)
    for rank in (0, 1):
        numbers = iterations(log, rank)
        assert numbers == list(range(1, int((saved / f"rank-{rank}").read_text()) + 1))
        where = f"rank {rank} of 2, local 0 of 1, on node{rank + 1}, meets at node1:{port}"
        of_rank = text(Path(f"{log}.ranks/rank-{rank}.log"))
        assert where in of_rank and where in text(log)
        assert "script pretrain_hybrid.py, CUDA_DEVICE_MAX_CONNECTIONS=32" in of_rank
        assert f"rank {rank} saved" in of_rank and f"rank {1 - rank}" not in of_rank


def test_two_tasks_on_a_node_save_when_they_are_told(slurm):
    log, saved = slurm.folder / "one.log", str(slurm.folder / "one")
    job = slurm.submit(SBATCH, log, options=["--nodes=1"], PYTHON=STAND_IN, GPUS_PER_NODE="2", CHECKPOINT_PATH=saved)
    starts = ("rank 0 of 2, local 0 of 2", "rank 1 of 2, local 1")
    slurm.wait_for("both ranks", lambda: all(each in text(log) for each in starts))
    slurm.ask("scancel", "--signal=TERM", job)
    assert slurm.outcome(job, 60) == "COMPLETED 0:0", text(log)


def shorten(slurm: Cluster, job: str, seconds: int) -> None:
    """Set a time limit of whole minutes, at least so many seconds from now. Slurm sends its signal up to a minute
    early, so very soon."""
    # DD-HH:MM:SS, the left parts only if they are needed.
    parts = [int(part) for part in re.split("[-:]", slurm.ask("squeue", "-h", "-o", "%M", "-j", job))]
    slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={parts[-2] + -(-(parts[-1] + seconds) // 60)}")


def test_away_from_the_repository_one_sentence_says_what_to_do(slurm, tmp_path):
    log = slurm.folder / "away.log"
    job = slurm.submit(str(ROOT / SBATCH), log, cwd=tmp_path)
    assert slurm.outcome(job, 60) == "FAILED 1:0"
    assert log.read_text() == f"error: {tmp_path} is not the repository: submit from its root, or set REPOSITORY.\n"


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_a_requeue_after_the_time_limit_resumes_training(slurm):
    """On two nodes with the losses of one that nothing disturbed on one node, and without a traceback."""
    log, saved = slurm.folder / "cut.log", slurm.folder / "cut"
    settings = {"GPUS_PER_NODE": "1", "PYTHON": sys.executable, "CHECKPOINT_PATH": str(saved)}
    long = ("--train-iters", "100000")
    job = slurm.submit(SBATCH, log, *long, options=["--nodes=2", "--time=29", "--signal=TERM@60"], **settings)
    slurm.wait_for("three iterations", lambda: len(training_losses(log)) >= 3, 600)
    shorten(slurm, job, 60)
    assert slurm.outcome(job, 300) == "COMPLETED 0:0", log.read_text()[-3000:]
    stopped = len(training_losses(log))
    assert "exiting program after receiving SIGTERM" in log.read_text()

    slurm.requeue(job)
    slurm.wait_for("four more iterations", lambda: len(training_losses(log)) >= stopped + 4, 600)
    slurm.ask("scancel", "--signal=TERM", job)
    assert slurm.outcome(job, 200) == "COMPLETED 0:0", log.read_text()[-3000:]
    losses = training_losses(log)
    assert "Traceback" not in log.read_text() and "srun: error" not in log.read_text()

    whole = slurm.folder / "whole.log"
    settings |= {"CHECKPOINT_PATH": "", "GPUS_PER_NODE": "2"}
    until = ("--exit-interval", str(len(losses)))
    job = slurm.submit(SBATCH, whole, *long, *until, options=["--nodes=1"], **settings)
    assert slurm.outcome(job, 900) == "COMPLETED 0:0", whole.read_text()[-3000:]
    assert losses == pytest.approx(training_losses(whole), abs=1e-5) and losses[-1] < losses[0]


def training_losses(log: Path) -> list[float]:
    return [float(loss) for loss in re.findall(r"\blm loss: (\S+)", text(log))]
