"""Bad input of the tools: for each fault one sentence on standard error and exit code 2."""

import json
import time

import pytest

from megatron.seq1f1b.commands import run

PLAN = ["--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "4096"]
PLAN += ["--pipeline-model-parallel-size", "2", "--sequence-splits", "4"]
HUGE = ["--pipeline-model-parallel-size", "64", "--num-microbatches", "4096", "--sequence-splits", "64"]

FILES = {
    "text.csv": "one two three",
    "nan.json": '{"f": NaN}',
    "list.json": "[1, 2]",
    "word.json": '{"f": "quick"}',
    "no.json": "{",
    "words": "4096 many",
    "repeated.csv": "0F0,0B0,0F0\n",
}

BAD = [
    ("plan-split", ["--pipeline-model-parallel-size", 0], "--pipeline-model-parallel-size: '0' is not a whole number"),
    ("plan-split", ["--num-layers", 0], "--num-layers: '0' is not"),
    ("plan-split", ["--num-microbatches", 0], "--num-microbatches: '0' is not"),
    ("plan-split", ["--tensor-model-parallel-size", 0], "--tensor-model-parallel-size: '0' is not"),
    ("plan-split", ["--tensor-model-parallel-size", "x"], "--tensor-model-parallel-size: 'x' is not"),
    ("plan-split", ["--sequence-splits", -2], "--sequence-splits: '-2' is not"),
    ("plan-split", ["--hidden-size", "2.5"], "--hidden-size: '2.5' is not"),
    ("plan-split", ["--seq-length", 3], "--seq-length 3 is too short for --sequence-splits 4"),
    ("plan-split", ["--num-attention-heads", 33], "--hidden-size 256 is not a multiple of --num-attention-heads 33"),
    ("plan-split", ["--num-query-groups", 3], "--num-attention-heads 4 is not a multiple of --num-query-groups 3"),
    ("plan-split", ["--num-layers", 1], "--num-layers 1 leaves some of the 2 stages without a layer"),
    ("plan-split", ["--sequence-split-file", "none"], "none"),
    ("plan-split", ["--sequence-split-file", "{}"], "{}"),
    ("plan-split", ["--sequence-split-file", "{}/words"], "words"),
    ("plan-split", ["--sequence-split-profile", "none.json"], "none.json"),
    ("plan-split", ["--sequence-split-profile", "{}/no.json"], "no.json"),
    ("plan-split", ["--no-such-flag"], "unrecognized arguments: --no-such-flag; --help lists the flags"),
    ("plot", ["--output", "{}/a.json", "--num-microbatches", 0], "--num-microbatches: '0' is not"),
    ("plot", ["--output", "{}/a.json", *HUGE], "make 33,554,432 actions"),
    ("plot", ["--output", "{}/a.gif"], "expected .png, .svg, .pdf"),
    ("plot", ["--output", "{}/none/a.json"], "there is no folder"),
    ("plot", ["--output", "{}/a.json", "--costs", "x=1"], "unknown cost 'x'"),
    ("plot", ["--output", "{}/a.json", "--costs", "f=nan"], "f is not a time"),
    ("plot", ["--output", "{}/a.json", "--costs", "f=-1"], "f is not a time"),
    ("plot", ["--output", "{}/a.json", "--costs", "f"], "--costs f: "),
    ("plot", ["--output", "{}/a.json", "--costs", "none.json"], "none.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/no.json"], "no.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/list.json"], "list.json: expected an object"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/word.json"], "word.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/nan.json"], "nan.json"),
    ("plot", ["--output", "{}/a.json", "--timeline", "none.json"], "none.json"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}"], "{}"),
    ("plot", ["--output", "{}/a.json", "--pipeline-schedule-file", "none.csv"], "none.csv"),
    ("check", ["none.csv"], "none.csv"),
    ("check", ["{}"], "{}"),
    ("check", ["{}/text.csv"], "text.csv"),
    ("check", ["{}/repeated.csv"], "is repeated"),
    ("check", [], "the following arguments are required: CSV"),
    ("compare", ["{}", "--output", "a.png"], "log.txt"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("tool, flags, sentence", BAD, ids=lambda value: str(value)[:60])
def test_one_sentence(tool, flags, sentence, folder, capsys):
    flags = [str(flag).replace("{}", str(folder)) for flag in flags]
    start = time.process_time()
    try:
        code = run(tool, [*(PLAN if tool == "plan-split" else []), *flags])
    except SystemExit as end:  # of the parser
        code = end.code
    output = capsys.readouterr()
    assert code == 2
    assert output.err.startswith("error: ") and "Traceback" not in output.err and output.out == ""
    assert output.err.count("\n") == 1 or tool == "check", "only what is wrong in a schedule is shown in its place"
    assert sentence.replace("{}", str(folder)) in output.err
    assert time.process_time() - start < 20, "nothing is refused after minutes of work"


def test_what_fits_is_drawn(folder):
    assert not run("plot", ["--output", str(folder / "a.json"), "--num-microbatches", "4", "--sequence-splits", "2"])
    assert len(json.loads((folder / "a.json").read_text())["ranks"]) == 4
