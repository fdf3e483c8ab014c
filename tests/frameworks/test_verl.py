"""verl's Megatron engine by segments: losses, gradient norms and log-probabilities are those of whole sequences.

Run by `bash scripts/frameworks.sh verl`, in an environment of its own. See verl_engine.py for what is verl's.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from frameworks import verl_engine, verl_ppo, verl_trainer
from frameworks.equal_steps import require_equal_steps, with_losses
from frameworks.marks import of_framework
from megatron.seq1f1b.commands import main
from support.launch import ROOT, python_path
from support.patience import patient

pytestmark = of_framework("verl", "verl", "verl")


ALL_CASES = {**verl_engine.CASES, **verl_engine.CASES_OF_THE_DEFAULT}


@pytest.fixture(scope="module")
def trainings(launch, launch_with_te, tmp_path_factory):
    """Of each case on the two ranks: with segments and without."""
    functions = {
        verl_engine.with_mbridge: launch,
        verl_engine.with_megatron_bridge: launch_with_te,
    }
    found = [{}, {}]
    log = ""
    for function, launcher in functions.items():
        results = launcher.call(2, function, 900, folder=tmp_path_factory.mktemp("qwen"))
        log += launcher.last.log
        for all_cases, cases in zip(found, results, strict=True):
            all_cases.update(cases)
    assert log.count("steps are run by megatron.seq1f1b: 1f1b, segments of at most 16 tokens") == len(ALL_CASES)
    return found


@pytest.mark.parametrize("case", ALL_CASES)
def test_steps_are_those_of_whole_sequences(trainings, case):
    require_equal_steps(trainings, case, verl_engine.STEPS)


@pytest.mark.parametrize("case", ALL_CASES)
def test_log_probabilities_are_those_of_whole_sequences(trainings, case):
    ours, own = with_losses(trainings, case)
    names = {"values"} if "critic" in case else {"log_probs", "entropy"}
    pairs = [(ours.before, own.before), (ours.after, own.after)]
    if "lora" in case:
        pairs.append((ours.without_adapters, own.without_adapters))
        assert (own.without_adapters["log_probs"] - own.after["log_probs"]).abs().max() > 1e-3
    for mine, others in pairs:
        assert mine.keys() == others.keys() == names
        for name in names:
            torch.testing.assert_close(mine[name], others[name], rtol=1e-5, atol=1e-5)


@pytest.fixture
def enabled():
    """This Python after `seq1f1b enable`."""
    assert main(["enable"]) == 0
    yield
    main(["enable", "--remove"])


def test_workers_in_ray_are_reached_by_the_variable(enabled, tmp_path):
    ours, log = run_in_ray(tmp_path, SEQ1F1B="--segment-tokens 16")
    own, silent = run_in_ray(tmp_path)
    workers = set(re.findall(r"Worker pid=([0-9]+)", log))
    assert len(workers) == 2
    assert workers <= set(re.findall("process ([0-9]+) runs Megatron's steps by SEQ1F1B='--segment-tokens 16'", log))
    assert "segments of at most 16 tokens" in log and "megatron.seq1f1b" not in silent
    assert len(own["losses"]) == verl_engine.STEPS
    assert ours["losses"] == pytest.approx(own["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(own["norms"], rel=1e-5)
    assert ours["log_probs"] == pytest.approx(own["log_probs"], abs=1e-5, rel=1e-5)
    assert ours["peaks"][0] < own["peaks"][0]


def run_in_ray(folder, **variables):
    """What verl_workers.py prints, as it says, and the log of all processes."""
    command = ["-m", "frameworks.verl_workers", str(folder)]
    log = run(command, "frameworks.verl_on_cpu", RAY_DEDUP_LOGS="0", **variables)
    [result] = [line for line in log.splitlines() if line.startswith('{"losses"')]
    return json.loads(result), log


def test_a_trainer_is_reached_by_the_variable(enabled, tmp_path):
    verl_trainer.save_model_and_conversations(tmp_path)
    flags = {"SEQ1F1B": "--segment-tokens 16"}
    ours, log = fine_tune(tmp_path, "ours", **flags)
    own, silent = fine_tune(tmp_path, "own")
    assert "segments of at most 16 tokens" in log and "megatron.seq1f1b" not in silent
    assert len(own) == verl_trainer.STEPS + 1  # and a validation
    for mine, whole in zip(ours, own, strict=True):
        assert mine == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(
        verl_trainer.saved_weights(tmp_path / "ours"), verl_trainer.saved_weights(tmp_path / "own"), rtol=0, atol=1e-6
    )
    fine_tune(tmp_path, "stopped", "trainer.total_training_steps=3", **flags)
    resumed, _ = fine_tune(tmp_path, "stopped", **flags)
    assert resumed == ours[3:]


def fine_tune(folder, name, *words, **variables):
    """What verl's trainer for fine-tuning logs, step by step, and the log of all processes."""
    metrics = folder / f"{name}.jsonl"
    command = [*torchrun_of(2), "-m", "verl.trainer.sft_trainer", *verl_trainer.words(folder, name), *words]
    log = run(command, "frameworks.verl_trainer_on_cpu", VERL_FILE_LOGGER_PATH=str(metrics), **variables)
    return verl_trainer.steps_of(metrics), log


def test_a_ppo_trainer_is_reached_by_the_variable(enabled, tmp_path):
    verl_ppo.save_model_and_prompts(tmp_path)
    ours, log = by_ppo(tmp_path, "ours", "+ray_kwargs.ray_init.runtime_env.env_vars.SEQ1F1B='--segment-tokens 16'")
    own, silent = by_ppo(tmp_path, "own")
    assert "segments of at most 16 tokens" in log and "megatron.seq1f1b" not in silent
    assert len(ours) == len(own) == verl_ppo.STEPS
    for mine, whole in zip(ours, own, strict=True):
        for name, value in whole.items():
            assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def by_ppo(folder, name, *words):
    """What verl's trainer for PPO logs, step by step, and the log of all processes."""
    metrics = folder / f"{name}.jsonl"
    command = ["-m", "verl.trainer.main_ppo", *verl_ppo.words(folder, name), *words]
    variables = {"VERL_FILE_LOGGER_PATH": str(metrics), "RAY_DEDUP_LOGS": "0", "RAY_memory_monitor_refresh_ms": "0"}
    log = run(command, "frameworks.verl_ppo_on_cpu", **variables)
    return verl_ppo.steps_of(metrics), log


def torchrun_of(ranks):
    return ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", f"--nproc-per-node={ranks}"]


def run(command, hook, **variables):
    """The log of all processes of a program of verl's, on a CPU by the module `hook`."""
    environment = {name: value for name, value in os.environ.items() if name != "SEQ1F1B"}
    environment |= {"PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    environment |= {"VERL_USE_EXTERNAL_MODULES": hook, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    return log


def test_segments_beside_megatrons_own_schedule(launch):
    small = "--rollouts 4 --median 32 --longest 256 --micro-batch-tokens 256 --segment-tokens 64 --hidden-size 32"
    flags = [*small.split(), "--repeats", "1"]
    log = launch(2, flags, script=ROOT / "tools" / "benchmark_posttraining.py", timeout=300).check().log
    *_, own, ours = log.splitlines()
    assert own.startswith("Megatron's own ") and ours.startswith("segments of 64 ")
    # The peaks of both ranks, in MB.
    assert all(float(number) > 0 for row in (own, ours) for number in row.split()[-2:])
