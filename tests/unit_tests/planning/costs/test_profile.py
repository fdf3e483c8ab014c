"""Measured costs: the fit, its error, the file, and refusals."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.partition import Task, cut_sequence, segment_times
from megatron.seq1f1b.planning.costs import bottleneck_time, check_profile, read_profile, write_profile
from megatron.seq1f1b.planning.costs.profile import MeasuredTime, Point, fit, least_squares, relative_errors
from support.partition_profile import LENGTHS, MODEL, PREFIXES, forward, profile


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_least_squares_finds_exact_coefficients(coefficients):
    rows = [[1, i, j, i * j] for i in (0.5, 2, 3, 7) for j in (1, 5, 9)]
    values = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
    assert least_squares(rows, values) == pytest.approx(coefficients, abs=1e-6)


def test_least_squares_refuses_what_is_not_determined():
    with pytest.raises(ValueError, match="do not determine"):
        least_squares([[1, 2], [2, 4], [3, 6]], [1, 2, 3])


def test_exact_times_are_fitted_exactly_at_other_lengths():
    time = fit([Point(n, p, forward(n, p)) for n in LENGTHS for p in PREFIXES])
    for length, prefix in ((512, 0), (700, 0), (3000, 5000), (4096, 20000), (8192, 0), (6000, 10000)):
        assert time(prefix, prefix + length) == pytest.approx(forward(length, prefix), rel=0.02)
    assert time(0, 100) == pytest.approx(forward(512, 0)), "nothing is faster than the shortest segment measured"
    assert profile().fit_error().highest < 1e-6


def test_the_error_of_a_bad_fit_is_reported():
    """A kernel twice as slow below 1024 rows is not what equation 9 describes."""
    error = profile(lambda length, prefix: 2.0 if length < 1024 else 1.0).fit_error()
    assert 0.02 < error.mean < error.highest < 1
    time = MeasuredTime((100,), (1.0,))
    assert relative_errors(time, [Point(100, 0, 80.0)]) == [0.25]


def test_stages_add_up_their_parts():
    first, middle, last = profile().costs([2, 1, 1])
    assert middle.forward(1024, 3072) == pytest.approx(forward(2048, 1024), rel=1e-3)
    assert first.forward(0, 2048) == pytest.approx(2 * forward(2048, 0) + 2e-7 * 1024)
    assert last.backward(0, 2048) == pytest.approx(2.2 * forward(2048, 0) + 6e-6 * 2048)
    assert last.total(0, 2048) == pytest.approx(last.forward(0, 2048) + last.backward(0, 2048))


def test_survives_its_file_and_balances_segments(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    again = read_profile(path)
    check_profile(again, path, replace(MODEL, num_layers=64), 1)
    costs = again.costs([1, 1, 1, 1])
    lengths = cut_sequence("profile", Task(16384, 4, time=bottleneck_time(costs)))
    times = segment_times(lengths, bottleneck_time(costs))
    assert lengths[0] > lengths[-1] and max(times) < 1.02 * sum(times) / 4
    assert sum(cut_sequence("terapipe", Task(16384, 4, time=bottleneck_time(costs), num_stages=4))) == 16384


def test_a_profile_of_another_model_is_refused():
    sentence = r"another model \(hidden_size 256 instead of 512, tensor_parallel_size 1 in"
    with pytest.raises(ValueError, match=sentence):
        check_profile(profile(), "p.json", replace(MODEL, hidden_size=512), 2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data["parts"].pop("head"),
        lambda data: data["parts"]["layer"].clear(),
        lambda data: data["parts"]["head"].pop(),
        lambda data: data["parts"]["layer"][0].update(forward=0),
        lambda data: data["parts"]["layer"][0].update(forward=float("nan")),
        lambda data: data["parts"]["layer"][0].update(backward=float("inf")),
        lambda data: data["parts"]["layer"][0].update(length="512"),
        lambda data: data.update(model=[]),
        lambda data: data["parts"].update(layer=[row for row in data["parts"]["layer"] if row["prefix"] in (0, 1024)]),
    ],
    ids=["no head", "no layer", "other lengths", "no time", "nan", "infinite", "text", "no model", "one prefix"],
)
def test_a_profile_that_does_not_suffice_is_refused(tmp_path, spoil):
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    sentence = "--sequence-split-profile .* no usable profile .*`seq1f1b profile`"
    with pytest.raises(ValueError, match=sentence):
        read_profile(path)
