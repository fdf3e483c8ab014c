"""What an unknown name may stand for, in the errors of commands and files."""

import pytest

from megatron.seq1f1b.commands.model_flags import PRESETS
from megatron.seq1f1b.costs.machine import machine_names
from megatron.seq1f1b.process.near_names import did_you_mean, near_names
from megatron.seq1f1b.schedule import FAMILY_NAMES


@pytest.mark.parametrize(
    "name, known, expected",
    [
        ("llama3", PRESETS, ["llama3-8b", "llama3-70b", "llama3-405b"]),
        ("Qwen3", PRESETS, ["qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b"]),
        ("70b", PRESETS, ["llama3-70b"]),
        ("llama-8b", PRESETS, ["llama3-8b"]),
        ("h20", machine_names(), ["h20-96gb", "h200-141gb"]),
        ("a100", machine_names(), ["a100-80gb", "a100-seq1f1b", "a100-vtrain"]),
        ("zbh1", FAMILY_NAMES, ["zb-h1"]),
        ("--micro", ["--micro-batch-size", "--mock-data"], ["--micro-batch-size"]),
        ("xyz", PRESETS, []),
        ("", PRESETS, []),
        ("--pp", [f"--pp-{number}" for number in range(20)], ["--pp-9"]),
    ],
)
def test_names_that_begin_alike_come_before_one_that_looks_alike(name, known, expected):
    assert near_names(name, known) == expected


def test_the_question_names_all_of_them():
    assert did_you_mean("llama3", PRESETS) == "did you mean llama3-8b, llama3-70b or llama3-405b?"
    assert did_you_mean("breadth", FAMILY_NAMES) == "did you mean breadth-first?"
    assert did_you_mean("xyz", FAMILY_NAMES) == ""
