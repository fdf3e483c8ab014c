"""The sbatch file on a Slurm of two nodes: it trains, is requeued, and ends well before its time limit."""

import re
import sys
from pathlib import Path

import pytest

from functional_tests.slurm_cluster import ROOT, Cluster, running_cluster

SBATCH = "scripts/slurm/pretrain_gpt.sbatch"
LONG = ("--train-iters", "100000", "--lr-decay-iters", "100")


@pytest.fixture(scope="module")
def slurm():
    with running_cluster(sys.executable) as cluster:
        yield cluster


def iterations(log: Path) -> list[int]:
    """The numbers of the iterations in a log, in its order."""
    text = log.read_text() if log.exists() else ""
    return [int(number) for number in re.findall(r"iteration +(\d+)/", text)]


def losses(log: Path) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log.read_text())]


def trained(slurm: Cluster, name: str, **settings: str) -> list[float]:
    log = slurm.folder / f"{name}.log"
    options = [f"--nodes={settings.pop('nodes')}"]
    job = slurm.submit(SBATCH, log, "--train-iters", "4", options=options, **settings)
    assert slurm.outcome(job, 300) == "COMPLETED 0:0", log.read_text()[-3000:]
    assert iterations(log) == [1, 2, 3, 4] and "[after training is done]" in log.read_text()
    ranks = sorted(path.name for path in Path(f"{log}.ranks").iterdir())
    assert ranks == ["rank-0.log", "rank-1.log"]
    assert iterations(Path(f"{log}.ranks/rank-1.log")) == [1, 2, 3, 4]
    return losses(log)


def test_two_nodes_train_as_one(slurm):
    one = trained(slurm, "one", nodes="1", GPUS_PER_NODE="2")
    two = trained(slurm, "two", nodes="2", GPUS_PER_NODE="1")
    assert one[-1] < one[0] and two == pytest.approx(one, abs=1e-5)


def test_a_requeued_job_goes_on_from_its_checkpoint_and_keeps_its_log(slurm):
    log, saved = slurm.folder / "requeued.log", slurm.folder / "requeued"
    settings = {"GPUS_PER_NODE": "1", "CHECKPOINT_PATH": str(saved), "SAVE_INTERVAL": "2"}
    job = slurm.submit(SBATCH, log, *LONG, options=["--nodes=2"], **settings)
    slurm.wait_for("a checkpoint", (saved / "latest_checkpointed_iteration.txt").exists, 300)
    slurm.ask("scontrol", "requeue", job)
    slurm.wait_for("its end", lambda: not slurm.ask("squeue", "-h", "-t", "R", "-j", job), 120)
    before = len(iterations(log))
    # Slurm would hold a requeued job back for two minutes.
    slurm.wait_for("a new start", lambda: starts_now(slurm, job), 120)
    slurm.wait_for("two iterations more", lambda: len(iterations(log)) >= before + 2, 300)
    slurm.ask("scancel", "--signal=TERM", job)
    assert slurm.outcome(job, 120) == "COMPLETED 0:0", log.read_text()[-3000:]
    numbers = iterations(log)
    assert numbers[0] == 1 and numbers == sorted(numbers) and "Traceback" not in log.read_text()


def starts_now(slurm: Cluster, job: str) -> bool:
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    return slurm.ask("squeue", "-h", "-t", "R", "-j", job) != ""


@pytest.mark.exhaustive
def test_before_the_time_limit_a_job_saves_and_ends_well(slurm):
    log, saved = slurm.folder / "limited.log", slurm.folder / "limited"
    settings = {"GPUS_PER_NODE": "1", "CHECKPOINT_PATH": str(saved)}
    # Slurm sends the signal up to a minute early.
    options = ["--nodes=2", "--time=4", "--signal=TERM@90"]
    job = slurm.submit(SBATCH, log, *LONG, options=options, **settings)
    assert slurm.outcome(job, 300) == "COMPLETED 0:0", log.read_text()[-3000:]
    text = log.read_text()
    assert "exiting program after receiving SIGTERM" in text and "Traceback" not in text
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) == iterations(log)[-1]


def test_away_from_the_repository_one_sentence_says_what_to_do(slurm, tmp_path):
    log = slurm.folder / "away.log"
    job = slurm.submit(str(ROOT / SBATCH), log, cwd=tmp_path)
    assert slurm.outcome(job, 60) == "FAILED 1:0"
    assert log.read_text() == f"error: {tmp_path} is not the repository: submit from its root, or set REPOSITORY.\n"
