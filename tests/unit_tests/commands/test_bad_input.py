"""Bad input of the tools: for each fault one sentence on standard error and exit code 2."""

import json
import struct
from pathlib import Path

import pytest
import torch.utils.cpp_extension  # noqa: F401, which warns once where CUDA is half installed

from megatron.seq1f1b.commands import run
from support.files import write_files

SMALL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --seq-length 8192 --global-batch-size 4"
PLAN = ["--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "4096"]
PLAN += ["--pipeline-model-parallel-size", "2", "--sequence-splits", "4"]

SPAN = {"kind": "F", "stage": 0, "microbatch": 0, "segment": 0, "start": 0.0, "end": 1.0}
SIZES = {"num_ranks": 1, "num_chunks": 1, "placement": "looped", "num_microbatches": 1, "num_segments": 1}


def timeline(**spoilt):
    """Of one action, some of its values spoilt."""
    span, sizes = ({name: spoilt.get(name, value) for name, value in part.items()} for part in (SPAN, SIZES))
    return json.dumps({"meta": sizes, "ranks": spoilt.get("ranks", [[span]])})


HEADER = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 4)  # of the index of a corpus
LOG = "  seq_length ..... 64\n iteration        1/ 2 | elapsed time per iteration (ms): 1.0 "
LOG += "| global batch size:     8 | lm loss: 1.0E+00 |\n"

TRACE = {"schedule": "1f1b", "iteration": 1, "peak_memory_bytes": [1]}
CELL = "7b,a100-80gb,8192,176,12,2,2,1.5,0.1,T2,1.6,0.2,P2"
CELLS = "model,machine,seq_length,bandwidth,host_bandwidth,gpus,batch,seconds,bubble_ratio,configuration,"
CELLS += "megatron_seconds,megatron_bubble_ratio,megatron_configuration\n"


def trace(**spoilt):
    """Of one action, as --pipeline-trace writes it, some of its values spoilt."""
    found = json.loads(timeline(**spoilt))
    found["meta"] |= {name: spoilt.get(name, value) for name, value in TRACE.items()}
    return json.dumps(found)


def cells(old, new):
    return f"{CELLS}{CELL}\n{CELL.replace(old, new)}\n"


FILES = {
    "own.csv": "0F0,0B0\n1F0,1B0\n",
    "cell_short.csv": cells(",0.2,P2", ""),
    "cell_nan.csv": cells("1.6", "nan"),
    "cell_many.csv": cells("P2", "P2,3"),
    "cell_batch.csv": cells("8192", "8192.5"),
    "header.csv": "model,machine\n",
    **{
        f"{name}/{path}": text
        for name, content in {
            "bytes": trace(peak_memory_bytes=["many"]),
            "ranks": trace(peak_memory_bytes=[1, 2]),
            "instant": trace(end=0.0),
            "unnumbered": trace(iteration="first"),
            "lengths": trace(segment_lengths=[5]).replace('"schedule"', '"segment_lengths": [1, 2], "schedule"'),
        }.items()
        for path, text in {"log.txt": LOG, "trace/iteration-1-pipeline-0.json": content}.items()
    },
    "many.json": '{"f": [1, true]}',
    "twice.json": '{"f": 1, "f": 2}',
    "unknown.json": '{"f": 1, "messag": 1}',
    "three.csv": "tokens,sequences\n5,1,2\n",
    "shares.toml": "[device]\nname = 1\n",
    "deep.json": "[" * 100_000,
    "sizes.json": timeline(num_ranks=10**9),
    "kind.json": timeline(kind="Z"),
    "stage.json": timeline(stage=0.5),
    "segment.json": timeline(segment=7),
    "microbatch.json": timeline(microbatch=-1),
    "lasts.json": timeline(end=float("nan")),
    "long.json": timeline(start=-1e308, end=1e308),
    "row.json": timeline(ranks=[["x"]]),
    "rows.json": timeline(ranks=[[SPAN], [SPAN]]),
    "chunks.json": timeline(num_chunks=1.5),
    "start.json": timeline(start="early"),
    "meta.json": json.dumps({"meta": SIZES}),
    "placement.json": timeline(placement="z"),
    "empty.csv": "",
    "cell.csv": "0F0" + "1" * 200_000,
    "binary.csv": bytes(range(256)),
    "sizes.csv": "0F999999999,0B0",
    "kind.csv": "0F0.0,0Q0.0",
    "digits.csv": "0F0.0,0F" + "9" * 5000,
    "reduce.csv": "0F0.0,0B0.0,0REDUCE",
    "stages.csv": "0F0.0,0B0.0\n1F0.0,1B0.0,2F0.0,2B0.0",
    "ascending.csv": "0F0.0,0F0.1,0B0.0,0B0.1",
    "forward.csv": "0F0.0,0F1.0,0B0.0",
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
    "three": "1 2 3",
    "repeated.csv": "0F0,0B0,0F0\n",
    "header.idx": HEADER,
    "cut.idx": HEADER + bytes(range(1, 7)),
    "negative.idx": HEADER + struct.pack("<3i", 5, -9, 5),
    "negative.csv": "tokens,sequences\n5,-1",
    "long.csv": "7,2\n99999999999,1",
}

TEXT = "--input {}/words --output-prefix {}/out --tokenizer-model {}/tokenizer --workers 1"
# In a row of the table, {} is a folder with these files, {text} one of them as text, {small} a question for `plan`.
BAD = [row.split(" => ") for row in Path(__file__).with_name("bad_input.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"), FILES)


@pytest.mark.parametrize("words, sentence", BAD, ids=lambda value: value[:60])
def test_one_sentence(words, sentence, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where tracebacks are written
    tool, *flags = words.replace("{text}", TEXT).replace("{}", str(folder)).replace("{small}", SMALL).split()
    before = {*folder.rglob("*")}
    code = run(tool, [*(PLAN if tool == "plan-split" else []), *flags])
    output = capsys.readouterr()
    assert code == 2
    assert output.err.startswith("error: ") and "Traceback" not in output.err and output.out == ""
    assert output.err.count("\n") == 1 or tool == "check", "only what is wrong in a schedule is shown in its place"
    assert sentence.replace("{}", str(folder)) in output.err and len(output.err) < 1000
    assert {*folder.rglob("*")} == before, "nothing is written"


def test_a_profile_of_ranks_without_numbers_is_one_sentence(capsys, tmp_path, monkeypatch):
    """They would wait for each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert run("profile", ["--output", str(tmp_path / "mine.toml")]) == 2
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE=2 in the environment, but RANK is not set; what ")
