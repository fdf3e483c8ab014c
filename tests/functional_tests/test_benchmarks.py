"""The benchmarks and `seq1f1b profile` run and measure what they claim to; speed itself is not tested."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.seq1f1b.costs.machine import read_machine
from support.launch import ROOT, torchrun

CHUNKS = "--num-virtual-stages-per-pipeline-rank"
TINY = ("--seq-length", "64", "--hidden-size", "32", "--repeats", "1")


def test_schedules_side_by_side_with_their_measured_times(launch, tmp_path):
    profile = tmp_path / "profile.json"
    flags = [*TINY, "--pipeline-schedule", "megatron", "1f1b", "zb-h1", "torch", "--sequence-splits", "2"]
    flags += [CHUNKS, "1", "2", "--profile", str(profile)]
    job = launch(2, flags, script=ROOT / "tools" / "benchmark.py", timeout=300).check()
    _, one_chunk, two_chunks = job.log.split("2 micro-batches, model chunks on a rank: ")
    for text, count in ((one_chunk, 4), (two_chunks, 3)):
        rows = [line for line in text.splitlines()[2:] if "0." in line]
        assert len(rows) == count
        assert rows[0].startswith("Megatron's own")
    assert "torch Schedule1F1B" in one_chunk and "cannot run 2 micro-batches here: torch" in job.log
    entries = json.loads(profile.read_text())
    assert [(entry["schedule"], entry["num_chunks"]) for entry in entries] == [
        (name, chunks) for chunks in (1, 2) for name in ("1f1b", "zb-h1")
    ]
    for entry in entries:
        assert sum(entry["lengths"]) == 64
        assert set(entry["seconds"]) == ({"F", "B"} if entry["schedule"] == "1f1b" else {"F", "I", "W"})
        assert all(len(table) == 2 * entry["num_chunks"] for table in entry["seconds"].values())
        assert all(len(row) == 2 and min(row) > 0 for table in entry["seconds"].values() for row in table)


@pytest.mark.parametrize(
    "ranks, flags, title, row",
    [
        (
            2,
            f"--pipeline-placement v {CHUNKS} 2 --pipeline-schedule megatron auto",
            ": 2 in a V",
            "auto, k = 2, balanced, V ",
        ),
        (4, "--context-parallel-size 2", "2 pipeline ranks of 2 context-parallel ranks", "1f1b, k = 2, balanced "),
    ],
    ids=["V", "CP"],
)
def test_other_layouts_beside_megatrons_own_schedule(launch, ranks, flags, title, row):
    words = [*TINY, *flags.split(), "--sequence-splits", "2"]
    log = launch(ranks, words, script=ROOT / "tools" / "benchmark.py", timeout=300).check().log
    first, second = log.partition("model chunks on a rank")[2].splitlines()[2:4]
    assert title in log and first.startswith("Megatron's own 1F1B ") and second.startswith(row)


def test_the_loss_in_pieces_beside_kept_logits(launch):
    flags = ["--seq-length", "64", "--hidden-size", "32", "--vocab-size", "512", "--piece", "2048", "--repeats", "1"]
    log = launch(1, flags, script=ROOT / "tools" / "benchmark_loss.py").check().log
    rows = [line.split() for line in log.splitlines() if line.startswith(("kept", "in pieces"))]
    assert len(rows) == 4 and all(float(row[-1]) > 0 for row in rows)  # relative, since seconds may round to 0.00


@pytest.mark.parametrize("part", ["attention", "layer", "latents"])
def test_segments_against_whole_sequences(launch, part):
    flags = [*TINY, "--part", part, "--sequence-splits", "2", "4"]
    assert f"{part}, pooled: " in launch(1, flags, script=ROOT / "tools" / "benchmark_attention.py").check().log


def test_steps_predicted_from_single_actions(launch):
    log = launch(2, [*TINY], script=ROOT / "tools" / "benchmark_prediction.py", timeout=300).check().log
    rows = [row.split()[-4:-2] for row in log.splitlines() if ", C = " in row]
    assert len(rows) == 8 and "mean error" in log
    assert all(float(number) > 0 for row in rows for number in row)


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))), reason="needs root, ip and tc")
def test_a_slow_link_between_two_namespaces():
    command = [sys.executable, ROOT / "tools" / "benchmark_network.py", *TINY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "Operation not permitted" in run.stderr:
        pytest.skip("namespaces are not permitted here")
    assert run.returncode == 0, run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines() if line.startswith(("| 0.1 ", "| 0.5 ", "| 1 "))]
    assert len(rows) == 12 and all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    assert "The ratios are predicted " in run.stdout
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "seq1f1b" not in listed.stdout


def test_the_longest_sequence_in_a_given_memory(launch):
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 16000 --num-microbatches 1"
    methods = ("Megatron's 1F1B", "Seq1F1B")
    search = ("--memory", 0.2, "--shortest", 1024, "--resolution", 1, "--methods", *methods)
    job = launch(1, [*model.split(), *search], script=ROOT / "tools" / "benchmark_longest.py", timeout=400).check()
    assert "All losses of 1024 tokens: " in job.log and "out of memory" in job.log
    assert all(f"| {method} | " in job.log for method in methods)


@pytest.mark.exhaustive
def test_two_ranks_measure_their_device_and_their_link(tmp_path):
    """That the constants are right: unit_tests/commands/test_profile.py."""
    output, command = tmp_path / "mine.toml", Path(sys.executable).with_name("seq1f1b")
    job = torchrun(command, 2, ["profile", "--output", output], timeout=600).check()
    machine = read_machine(output)
    assert output.read_text() in job.log and job.log.count("written. Predict with it") == 1
    assert 0 < machine.device.flash_forward < 2 and 0 < machine.device.matmul_efficiency < 2
    assert machine.node.bandwidth != read_machine("cpu").node.bandwidth
