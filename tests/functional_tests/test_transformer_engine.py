"""Transformer Engine's layers under Megatron's training loop (test_equality.py has their gradients)."""

import pytest

from functional_tests.equality import layout
from functional_tests.equality.cases import Layout
from functional_tests.equality.models import Model
from megatron.seq1f1b.files.schedule_file import write_schedule
from megatron.seq1f1b.model import use_segment_attention
from megatron.seq1f1b.schedule import Placement, Shape, build
from support.launch import ITERATIONS, TINY_GPT

TRAINING = (*TINY_GPT, "--mock-data", "--transformer-impl", "transformer_engine", "--pipeline-model-parallel-size", "2")


def lose_nothing_but_fp8_state() -> None:
    """Which holds nothing without fp8."""
    chunks = layout.build(Model(transformer_engine="unfused"), Layout())
    before = chunks[0].state_dict()
    use_segment_attention(chunks)
    gone = before.keys() - chunks[0].state_dict().keys()
    assert chunks[0].state_dict().keys() <= before.keys()
    assert gone and all(name.endswith(".core_attention._extra_state") for name in gone), gone
    assert all(before[name] is None or before[name].numel() == 0 for name in gone)


def test_a_checkpoint_keeps_its_names(launch_with_te):
    launch_with_te.call(1, lose_nothing_but_fp8_state)


def test_segments_train_as_whole_sequences_under_megatron(launch_with_te, tmp_path):
    """Its own attention runs on GPUs only; ours takes its place without segments, too."""
    whole = launch_with_te(2, TRAINING).check().losses()
    assert len(whole) == ITERATIONS
    write_schedule(build("zb-h1", Shape(Placement(2), 4, 2)), tmp_path / "mine.csv")  # with weight gradients apart
    from_file = ("--pipeline-schedule-file", tmp_path / "mine.csv", "--sequence-splits", "2")
    for flags in (("--sequence-splits", "4"), from_file):
        assert launch_with_te(2, [*TRAINING, *flags]).check().losses() == pytest.approx(whole, abs=1e-5)
