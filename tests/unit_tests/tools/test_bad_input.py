"""Bad input of the tools: for each fault one sentence on standard error and exit code 2."""

import json
import time

import pytest

from megatron.seq1f1b.commands import run

PLAN = ["--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "4096"]
PLAN += ["--pipeline-model-parallel-size", "2", "--sequence-splits", "4"]
HUGE = ["--pipeline-model-parallel-size", "64", "--num-microbatches", "4096", "--sequence-splits", "64"]

SPAN = {"kind": "F", "stage": 0, "microbatch": 0, "segment": 0, "start": 0.0, "end": 1.0}
SIZES = {"num_ranks": 1, "num_chunks": 1, "placement": "looped", "num_microbatches": 1, "num_segments": 1}


def timeline(**spoilt):
    """Of one action, some of its values spoilt."""
    span, sizes = ({name: spoilt.get(name, value) for name, value in part.items()} for part in (SPAN, SIZES))
    return json.dumps({"meta": sizes, "ranks": spoilt.get("ranks", [[span]])})


LOG = (
    "  seq_length ..... 64\n iteration        1/ 2 | elapsed time per iteration (ms): 1.0 | global batch size:     8 |"
    " lm loss: 1.0E+00 |\n"
)

FILES = {
    "deep.json": "[" * 100_000,
    "sizes.json": timeline(num_ranks=10**9),
    "kind.json": timeline(kind="Z"),
    "stage.json": timeline(stage=0.5),
    "segment.json": timeline(segment=7),
    "microbatch.json": timeline(microbatch=-1),
    "lasts.json": timeline(end=float("nan")),
    "long.json": timeline(start=-1e308, end=1e308),
    "row.json": timeline(ranks=[["x"]]),
    "placement.json": timeline(placement="z"),
    "empty.csv": "",
    "cell.csv": "0F0" + "1" * 200_000,
    "binary.csv": bytes(range(256)),
    "sizes.csv": "0F999999999,0B0",
    "floats": "[1.5, 2]",
    "nothing": "# nothing",
    "untraced/log.txt": LOG,
    "unlogged/log.txt": "nothing",
    "foreign/log.txt": LOG,
    "foreign/trace/iteration-1-pipeline-0.json": timeline(),
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
    ("plan-split", ["--sequence-split-profile", "{}/deep.json"], "deep.json cannot be read: it is nested too deeply"),
    ("plan-split", ["--sequence-split-profile", "{}/kind.json"], "kind.json is no usable trace ("),
    ("plan-split", ["--sequence-split-file", "{}/binary.csv"], "cannot be read (it is not UTF-8 text)"),
    ("plan-split", ["--sequence-split-file", "{}/floats"], "must hold the lengths of the segments in tokens"),
    ("plan-split", ["--sequence-split-file", "{}/nothing"], "must hold the lengths of the segments in tokens"),
    ("plan-split", ["--tensor-model-parallel-size", 3], "--num-attention-heads 4 is not a multiple of --tensor-model"),
    ("plan-split", ["--num-microbatches", 10**8], "take at most --num-microbatches 62500, the rest repeats itself"),
    ("plan-split", ["--output", "{}/a.gif"], "expected a name that ends in .png, .svg, .pdf"),
    ("plan-split", ["--output", "{}/none/a.png"], "there is no folder {}/none"),
    ("plan-split", ["--no-such-flag"], "unrecognized arguments: --no-such-flag; --help lists the flags"),
    ("plot", ["--output", "{}/a.json", "--num-microbatches", 0], "--num-microbatches: '0' is not"),
    ("plot", ["--output", "{}/a.json", *HUGE], "make 33,554,432 actions"),
    ("plot", ["--output", "{}/a.gif"], "expected a name that ends in .png, .svg, .pdf"),
    ("plot", ["--output", "{}/none/a.json"], "there is no folder"),
    ("plot", ["--output", "{}/a.json", "--costs", "x=1"], "unknown cost 'x'"),
    (
        "plot",
        ["--output", "{}/a.json", "--costs", "f=nan"],
        "cost table 'f' holds a number that is negative or not finite",
    ),
    ("plot", ["--output", "{}/a.json", "--costs", "f=-1"], "cost table 'f' holds a number that is negative"),
    ("plot", ["--output", "{}/a.json", "--costs", "f"], "--costs f: 'f' is not a name and a number, such as f=1"),
    ("plot", ["--output", "{}/a.json", "--costs", "none.json"], "none.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/no.json"], "no.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/list.json"], "list.json: costs are a table of names and numbers"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/word.json"], "word.json"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/nan.json"], "nan.json"),
    ("plot", ["--output", "{}/a.json", "--timeline", "none.json"], "none.json"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}"], "{}"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/list.json"], "list.json is no timeline: a value in it is of"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/deep.json"], "deep.json cannot be read: it is nested too"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/sizes.json"], "num_ranks is 1000000000, which its 1 actions"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/kind.json"], "'Z' is not a valid Kind; --pipeline-trace"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/stage.json"], "0.5F0.0 is not of 1 ranks"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/segment.json"], "0F0.7 is not of 1 ranks"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/microbatch.json"], "0F-1.0 is not of 1 ranks"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/lasts.json"], "0F0.0 lasts from 0.0 to nan"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/long.json"], "0F0.0 lasts from -1e+308 to 1e+308"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/row.json"], "row.json is no timeline: a value in it is of"),
    ("plot", ["--output", "{}/a.json", "--timeline", "{}/placement.json"], "unknown placement 'z'"),
    ("plot", ["--output", "{}/a.json", "--costs", "{}/deep.json"], "deep.json cannot be read: it is nested too deeply"),
    ("plot", ["--output", "{}/a.json", "--costs", "f=0,i=0,w=0"], "nothing takes any time"),
    ("plot", ["--output", "{}/a.json", "--memory-limit", "1"], "is for --pipeline-schedule auto"),
    ("plot", ["--output", "{}/a.json", "--pipeline-schedule", "auto", "--memory-limit", "nan"], "must be above 0"),
    ("plot", ["--output", "/proc/a.json"], "/proc/a.json cannot be written"),
    ("plot", ["--output", "{}"], "expected a name that ends in"),
    ("plot", ["--output", "{}/a.json", "--costs", "f=1e308"], "takes longer than a number can be"),
    (
        "plot",
        ["--output", "{}/a.json", "--pipeline-schedule-file", "{}/own.csv", "--num-microbatches", 8],
        "--num-microbatches has no effect beside --pipeline-schedule-file",
    ),
    (
        "plot",
        ["--output", "{}/a.png", "--timeline", "{}/row.json", "--costs", "f=1"],
        "--costs has no effect beside --timeline",
    ),
    ("plot", ["--output", "{}/a.json", "--pipeline-schedule-file", "none.csv"], "none.csv"),
    ("check", ["none.csv"], "none.csv"),
    ("check", ["{}"], "{}"),
    ("check", ["{}/text.csv"], "text.csv"),
    ("check", ["{}/repeated.csv"], "is repeated"),
    ("check", ["{}/empty.csv"], "empty.csv holds no actions: write one row for each rank"),
    ("check", ["{}/cell.csv"], "cell.csv, line 1: field larger than field limit (131072)"),
    ("check", ["{}/binary.csv"], "binary.csv cannot be read: it is not UTF-8 text"),
    ("check", ["{}/sizes.csv"], "1000000000 micro-batches, 1 segments, more than its 2 actions can be"),
    ("check", [], "the following arguments are required: CSV"),
    ("compare", ["{}", "--output", "{}/a.png"], "log.txt"),
    ("compare", ["{}", "--output", "{}/a.gif"], "expected a name that ends in .png, .svg, .pdf"),
    ("compare", ["{}/unlogged", "--output", "{}/a.png"], "holds no training iteration with its loss"),
    ("compare", ["{}/untraced", "--output", "{}/a.png"], "holds no trace; was the run started with --pipeline-trace?"),
    ("compare", ["{}/foreign", "--output", "{}/a.png"], "it is not what --pipeline-trace wrote"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
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
