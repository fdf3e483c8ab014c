"""The configuration of a process is made once and handed on."""

import importlib

import pytest
from megatron.core.pipeline_parallel import schedules

import megatron.seq1f1b
from megatron.seq1f1b.arguments import sequence_partition
from megatron.seq1f1b.install import Overlay
from megatron.seq1f1b.partition import cut
from unit_tests.arguments.parsed import parsed


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of functions by `calls(module, name)`."""
    counted = []

    def count(module, name):
        function = getattr(module, name)

        def counting(*args, **kwargs):
            counted.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)
        return counted

    return count


@pytest.mark.parametrize("flags", [(), ("--sequence-splits", "4")], ids=["number found", "number given"])
def test_terapipes_programme_is_solved_once(calls, flags):
    for module in (sequence_partition, cut):
        solved = calls(module, "terapipe")
    args = parsed("--sequence-split-strategy", "terapipe", "--device", "cuda", *flags, pipeline_model_parallel_size=8)
    config = megatron.seq1f1b.validate(args)
    assert config.cut(16384) == config.lengths
    assert solved == ["terapipe"]


def test_what_validate_made_is_what_everybody_gets(calls, monkeypatch):
    overlay = Overlay(schedules.get_forward_backward_func)
    monkeypatch.setattr(schedules, "get_forward_backward_func", overlay.get_forward_backward_func)
    made = calls(importlib.import_module("megatron.seq1f1b.install"), "make_config")
    config = megatron.seq1f1b.validate(parsed("--sequence-splits", "4", sft=True))
    for _ in range(3):  # as for every batch of --sft
        assert megatron.seq1f1b.pipeline_config() is config and config.follows_documents
    assert made == ["make_config"]
