"""What `seq1f1b plot`, `check`, `compare` and `plan-split` write and print."""

import json
import re
from math import nan

import pytest

from megatron.seq1f1b.commands import compare, run
from megatron.seq1f1b.commands.compare import TrainingLog, read_training_log
from megatron.seq1f1b.files.schedule_file import read_schedule
from megatron.seq1f1b.files.timeline_file import read_timeline, write_timeline
from megatron.seq1f1b.schedule import MOVE_KINDS, Costs, Placement, Shape, Timeline, build, simulate
from support.launch import ROOT

SIZES = ["--pipeline-model-parallel-size", "4", "--num-microbatches", "3", "--sequence-splits", "2"]


def seq1f1b(name, *words):
    return run(name, list(map(str, words)))


def test_every_output_of_the_command(tmp_path):
    pytest.importorskip("matplotlib")
    assert seq1f1b("plot", *SIZES, "--pipeline-schedule", "zb-h1", "--output", tmp_path / "a.csv") == 0
    assert read_schedule(tmp_path / "a.csv") == build("zb-h1", Shape(Placement(4), 3, 2))
    own = ["--pipeline-schedule-file", tmp_path / "a.csv", "--costs", "f=1,i=2,w=3,message=0.5"]
    assert seq1f1b("plot", *own, "--output", tmp_path / "a.json") == 0
    timeline = read_timeline(tmp_path / "a.json")
    assert timeline.busy(0) == 3 * 2 * (1 + 2 + 3) and timeline.ranks[1][0].start == 1.5
    assert seq1f1b("plot", *own, "--output", tmp_path / "a.trace.json") == 0
    assert json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]
    assert seq1f1b("plot", "--timeline", *[tmp_path / "a.json"] * 2, "--output", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_name_and_python_makes_the_same(tmp_path, monkeypatch, capsys):
    """The ten lines of docs/schedules.md."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert seq1f1b("plot", *SIZES) == 0
    assert capsys.readouterr().out == "schedule.png written.\n"
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    (code,) = re.findall(
        "ten lines of Python.*?```python\n(.*?)```", (ROOT / "docs" / "schedules.md").read_text(), re.S
    )
    exec(code, {})
    timeline = simulate(build("1f1b", Shape(Placement(4), 8, 4)))
    assert capsys.readouterr().out.startswith(f"{timeline.makespan} {timeline.bubble_ratio} ")
    assert (tmp_path / "seq1f1b.png").exists()


def test_moves_to_the_host_have_spans_of_their_own(tmp_path):
    words = [*SIZES, "--costs", "f=1,i=1,w=1,move=0.5", "--offload-activations", 1]
    for end in ("csv", "json"):
        assert seq1f1b("plot", *words, "--output", tmp_path / f"a.{end}") == 0
    assert read_schedule(tmp_path / "a.csv").has_moves
    own = ["--pipeline-schedule-file", tmp_path / "a.csv", *words[len(SIZES) : -2]]
    assert seq1f1b("plot", *own, "--output", tmp_path / "b.json") == 0
    timeline = read_timeline(tmp_path / "a.json")
    assert timeline.time_unit == "", "--costs has none"
    assert read_timeline(tmp_path / "b.json").ranks == timeline.ranks
    moves = [span for rank in timeline.ranks for span in rank if span.action.kind in MOVE_KINDS]
    assert moves and {round(span.end - span.start, 9) for span in moves} == {0.5}


def test_pairs_have_one_time_and_a_cell(tmp_path):
    words = [*SIZES, "--overlap-moe-expert-parallel-comm"]
    for end in ("csv", "json"):
        assert seq1f1b("plot", *words, "--output", tmp_path / f"a.{end}") == 0
    assert read_schedule(tmp_path / "a.csv") == build("1f1b", Shape(Placement(4), 3, 2), pairs=True)
    timeline = read_timeline(tmp_path / "a.json")
    assert [len(timeline.paired(rank)) for rank in range(4)] == [0, 0, 4, 8]
    assert timeline.busy(3) == 3 * 2 * 3


def test_costs_from_a_file_for_auto(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"f": [1, 2], "i": 1.5, "message": 0.1, "activation": 2}))
    chunks = ["--num-virtual-stages-per-pipeline-rank", 2, "--pipeline-placement", "v"]
    sizes = [*SIZES, *chunks, "--costs", tmp_path / "costs.json"]
    words = [*sizes, "--pipeline-schedule", "auto", "--memory-limit", 16, "--output", tmp_path / "a.json"]
    assert seq1f1b("plot", *words) == 0
    spans = [span for rank in read_timeline(tmp_path / "a.json").ranks for span in rank]
    durations = {(span.action.kind.value, span.action.segment): round(span.end - span.start, 6) for span in spans}
    assert [durations[key] for key in (("F", 0), ("F", 1), ("I", 0), ("W", 0))] == [1, 2, 1.5, 1]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.trace.json", "a.png"])
def test_an_unfinished_file_leaves_what_was_there(name, tmp_path, monkeypatch, capsys):
    """A disk that is full before the name is changed names no file itself."""
    (tmp_path / name).write_text("before")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert seq1f1b("plot", *SIZES, "--output", tmp_path / name) == 2
    sentence = f"error: --output {tmp_path / name}: cannot be written: No space left on device; {tmp_path} has "
    assert capsys.readouterr().err.startswith(sentence)
    assert (tmp_path / name).read_text() == "before" and list(tmp_path.iterdir()) == [tmp_path / name]


def test_the_checker(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n")
    assert seq1f1b("check", path) == 0
    printed = capsys.readouterr().out
    assert "valid; ranks: 2, model chunks on each: 1 (looped), micro-batches: 1, segments: 2" in printed
    assert "most sequences held by each rank, of all its layers: 1.00 1.00" in printed
    for kind, rest in (("B", ""), ("I", ",1W0.0,1W0.1")):
        path.write_text(f"0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1{kind}0.0,1{kind}0.1{rest}\n")
        assert seq1f1b("check", path) == 2
        error = capsys.readouterr().err
        sentence, above, below = error.splitlines()
        assert sentence.startswith(f"error: {path}: rank 1, action 2: 1{kind}0.0 comes before 1{kind}0.1")
        assert sentence.endswith("descending order.")
        assert above.startswith("  rank 0    0F0.0") and below.startswith("> rank 1    1F0.0   1F0.1  [1")


@pytest.mark.parametrize(
    "runs, sentence",
    [
        ([(1.0, nan), (1.0, 1.0)], "The losses of iteration 2 differ: nan in a, 1.0 in b."),
        ([(1.0, 1.0), (1.0, nan)], "The losses of iteration 2 differ: 1.0 in a, nan in b."),
        ([(1.0, 2.0, 3.0), (1.0, 2.5)], "Losses of the first 2 iterations differ by at most 5.0e-01."),
        ([(1.0, 2.0), (1.0, 2.0, 3.0)], "Losses of the first 2 iterations differ by at most 0.0e+00."),
    ],
)
def test_losses_are_compared_as_far_as_all_runs_have_them(runs, sentence):
    assert compare.losses(["a", "b"], [TrainingLog(losses, 1.0, 1.0) for losses in runs]) == sentence


def test_a_log_may_have_losses_that_are_no_numbers(tmp_path):
    line = "iteration {}/ 9 | elapsed time per iteration (ms): 5.0 | global batch size: 8 | lm loss: {} | rest\n"
    text = " seq_length ....... 16\n" + "".join(line.format(n, x) for n, x in enumerate(("1.0E+00", "NAN", "-INF")))
    (tmp_path / "log.txt").write_text(text)
    assert list(map(str, read_training_log(tmp_path / "log.txt").losses)) == ["1.0", "nan", "-inf"]


def test_a_way_to_cut_that_fails_names_flags_of_its_command(capsys):
    model = ["--num-layers", 8, "--hidden-size", 64, "--num-attention-heads", 2, "--pipeline-model-parallel-size", 2]
    assert seq1f1b("plan-split", *model, "--seq-length", 100, "--sequence-splits", 100) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("uniform_comp: ") and printed.err.endswith("; use fewer segments or even.\n")


SMALL = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "8", "--vocab-size", "1024"]
SMALL += ["--seq-length", "16384", "--sequence-splits", "4", "--pipeline-model-parallel-size", "4"]
SMALL += ["--num-microbatches", "4"]


def rows(text):
    """Name of each strategy to (segments, imbalance, step, bubble)."""
    lines = (re.split(" {2,}", line) for line in text.split("\n\n")[0].splitlines()[1:])
    return {name: (int(segments), *map(float, numbers[:3])) for name, segments, *numbers in lines}


def test_balance_shows_in_the_predicted_step_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert seq1f1b("plan-split", *SMALL, "--output", tmp_path / "splits.png") == 0
    assert (tmp_path / "splits.png").stat().st_size > 10_000
    found = rows(capsys.readouterr().out)
    assert list(found) == ["even", "uniform_comp", "balanced", "terapipe", "terapipe, free"]
    for better, worse in (("balanced", "uniform_comp"), ("uniform_comp", "even")):
        assert all(x < y for x, y in zip(found[better][1:], found[worse][1:], strict=True)), (better, worse)
    assert found["terapipe, free"][0] > 4 and found["terapipe, free"][2] < found["terapipe"][2]


def test_a_file_and_a_trace_take_part(capsys, tmp_path):
    lengths, trace = tmp_path / "mine", tmp_path / "trace.json"
    lengths.write_text("8192 4096 4096")
    shape = Shape(Placement(4), 2, 4)
    step = simulate(build("1f1b", shape), Costs.uniform(shape))
    write_timeline(Timeline(shape, step.ranks, "s", {"segment_lengths": [4096] * 4}), trace)
    assert seq1f1b("plan-split", *SMALL, "--sequence-split-file", lengths, "--sequence-split-profile", trace) == 0
    output = capsys.readouterr().out
    assert "Measured in a run; the fit is off by 0.0 %" in output
    found = rows(output.split("\n\n", 1)[1])
    assert "profile" in found and "balanced" not in found and found["mine"][0] == 3
