"""A long training with evaluation, checkpoints and traces in between, on ranks that are late at random: it does not
hang, and memory, threads and open files stay as many as they were."""

import json
import math
from pathlib import Path

import pytest

from support.launch import TINY_GPT

SCRIPT = Path(__file__).parent / "scripts" / "soak_script.py"
MEGABYTE = 2**20


@pytest.mark.exhaustive
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("iterations", [60, 2000])
def test_nothing_grows(launch, tmp_path, iterations):
    every = iterations // 10
    flags = [*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2", "--sequence-splits", "3"]
    flags += ["--pipeline-schedule", "zb-h1", "--train-iters", iterations, "--num-layers", "2"]
    flags += ["--eval-interval", every, "--eval-iters", "1", "--save", tmp_path / "saved", "--save-interval", every]
    flags += ["--pipeline-trace", tmp_path / "trace", "--pipeline-trace-iterations"]
    flags += [str(number) for number in range(every, iterations + 1, every)]
    job = launch(2, flags, script=SCRIPT, timeout=5 * iterations, env={"SOAK": str(tmp_path / "held")}).check()

    losses = job.losses()
    assert len(losses) == iterations and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert len(job.losses("lm loss value")) >= 10
    assert len(list((tmp_path / "trace").iterdir())) == len(list((tmp_path / "saved").glob("iter_*"))) == 10
    for rank in (0, 1):
        held = [json.loads(line) for line in (tmp_path / f"held.{rank}").read_text().splitlines()]
        assert [each["iteration"] for each in held] == list(range(iterations))
        # All that happens has happened by then at least three times.
        before, after = held[3 * every + 2 : 5 * every], held[-2 * every + 2 :]
        for what, more in (("threads", 0), ("files", 0), ("bytes", 8 * MEGABYTE)):
            assert max(each[what] for each in after) <= max(each[what] for each in before) + more, what
