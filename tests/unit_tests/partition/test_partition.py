"""Segment lengths: the authors' golden values, and what holds for every cut."""

import csv
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.seq1f1b.partition import (
    STRATEGIES,
    Task,
    cut_sequence,
    even,
    read_lengths,
    uniform_comp,
)
from megatron.seq1f1b.planning.costs.blocks import authors_flops
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, analytic_costs, bottleneck_time

GPT_2_7B = ModelShape(32, 2560, 10240, 32, 80, 32768)
GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)
TIME = bottleneck_time(analytic_costs(GPT_7B, (32,), A100))
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


@pytest.fixture
def file(tmp_path):
    return tmp_path / "lengths"


@pytest.mark.parametrize("text", ["[4096, 2048, 2048]", "4096 2048 2048", "4096,\n2048,  # the middle\n2048\n"])
def test_lengths_from_a_file(file, text):
    file.write_text(text)
    assert read_lengths(file, 8192, None, 8) == read_lengths(file, 8192, 3, 1) == (4096, 2048, 2048)


@pytest.mark.parametrize(
    "text, problem",
    [(text, "positive integers .*; correct the file") for text in ("", "# nothing", "1024 -5", "1024 0", "1e3 24")]
    + [(text, "positive integers .*; correct the file") for text in ('{"lengths": [1]}', "[1024, true]", "9" * 12)]
    + [("4096 4095", "add up to 8191, not to --seq-length 8192"), ("2048 6144", "2 segments, not --sequence-splits 3")]
    + [("1 4096 4095", "a segment of 1 tokens, not a multiple of 8"), (None, "lengths cannot be read")],
)
def test_files_that_do_not_fit_are_refused(file, text, problem):
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=f"--sequence-split-file .*{problem}"):
        read_lengths(file, 8192, 3, 8)


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
