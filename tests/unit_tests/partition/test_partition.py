"""Segment lengths: the authors' golden values, and what holds for every cut."""

import csv
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.seq1f1b.partition import (
    STRATEGIES,
    Task,
    check_lengths,
    cut_sequence,
    even,
    read_lengths,
    uniform_comp,
)
from megatron.seq1f1b.planning.costs.flops import authors_flops
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, analytic_costs, bottleneck_time

GPT_2_7B = ModelShape(32, 2560, 10240, 32, 80, 32768)
GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)
TIME = bottleneck_time(analytic_costs(GPT_7B, [32], A100))
TABLE = list(csv.DictReader((Path(__file__).parent.parent / "data" / "seq1f1b_cwp_splits.csv").open()))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['seqlen']}-k{row['k']}")
def test_uniform_comp_gives_the_authors_lengths(row):
    model = {"2.7B": GPT_2_7B, "7B": GPT_7B}[row["model"]]
    lengths = uniform_comp(int(row["seqlen"]), int(row["k"]), *authors_flops(model), int(row["tp"]))
    assert lengths == tuple(int(length) for length in row["splits"].split(";"))


def test_uniform_comp_refuses_an_empty_segment():
    with pytest.raises(ValueError, match="--sequence-splits 8 .* empty segment"):
        uniform_comp(16, 8, *authors_flops(GPT_7B), multiple_of=8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_that_is_no_multiple_is_refused(strategy):
    with pytest.raises(ValueError, match="--seq-length 1001 is not a multiple of 8"):
        cut_sequence(strategy, Task(1001, 4, 8, time=TIME, flops=authors_flops(GPT_7B)))


@pytest.mark.parametrize("text", ["[4096, 2048, 2048]", "4096 2048 2048", "4096,\n2048,  # the middle\n2048\n"])
def test_lengths_from_a_file(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    lengths = read_lengths(path)
    assert lengths == (4096, 2048, 2048)
    check_lengths(lengths, path, 8192, None, 8)
    check_lengths(lengths, path, 8192, 3, 1)
    with pytest.raises(ValueError, match="add up to 8192, not to --seq-length 4096"):
        check_lengths(lengths, path, 4096, None, 1)
    with pytest.raises(ValueError, match="3 segments, not --sequence-splits 4"):
        check_lengths(lengths, path, 8192, 4, 1)
    with pytest.raises(ValueError, match="4096 tokens, which is not a multiple of 3"):
        check_lengths(lengths, path, 8192, None, 3)


@pytest.mark.parametrize("text", ["", "# nothing", "1024 -5", "1024 0", '{"lengths": [1]}', "[1024, true]", "1e3 24"])
def test_a_file_without_lengths_is_refused(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(ValueError, match="--sequence-split-file .* positive integers .*; correct the file"):
        read_lengths(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--sequence-split-file .*missing cannot be read"):
        read_lengths(tmp_path / "missing")


@given(pieces=st.integers(1, 5000), segments=st.integers(1, 64), multiple_of=st.sampled_from([1, 2, 4, 8]))
def test_even_lengths_differ_by_one_piece_at_most(pieces, segments, multiple_of):
    assume(segments <= pieces)
    length = pieces * multiple_of
    lengths = even(length, segments, multiple_of)
    assert len(lengths) == segments and sum(lengths) == length
    assert all(part > 0 and part % multiple_of == 0 for part in lengths)
    assert max(lengths) - min(lengths) <= multiple_of


@given(pieces=st.integers(64, 16384), segments=st.integers(1, 16), multiple_of=st.sampled_from([1, 2, 8]))
def test_uniform_comp_shortens_towards_the_end(pieces, segments, multiple_of):
    length = pieces * multiple_of
    lengths = uniform_comp(length, segments, *authors_flops(GPT_7B), multiple_of)
    assert len(lengths) == segments and sum(lengths) == length
    assert all(part > 0 and part % multiple_of == 0 for part in lengths)
    # The first segment takes the rest of all roundings, the others shrink as their prefix grows.
    assert all(later <= earlier + multiple_of for earlier, later in zip(lengths, lengths[1:], strict=False))
