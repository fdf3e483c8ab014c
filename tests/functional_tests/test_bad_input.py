"""Bad input of a training: for each fault one sentence on rank 0, exit code 2, and no traceback but in a file."""

import os
import shutil
import socket
import struct
from pathlib import Path

import pytest

from support.files import write_files
from support.launch import PRETRAIN, ROOT, TINY_GPT

SPLIT = "--sequence-splits 2 "
MOCK = "--mock-data "

# A row of the table has flags after those of a tiny GPT, and words of the sentence; {} is a folder of files. The world
# has one rank unless a row starts with "ranks=2 "; what starts with "hybrid " is for pretrain_hybrid.py.
TABLE = (Path(__file__).parent / "bad_input.txt").read_text().strip("[").split("\n[")
# Of each kind so many run with every run of the tests.
USUAL = 3
CASES = [
    pytest.param(*row.split("=>"), id=row[:58], marks=[] if number < USUAL else pytest.mark.exhaustive)
    for kind in TABLE
    for number, row in enumerate(kind.splitlines()[1:])
]
INDEX = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 6, 0, 1, 2)
NEGATIVE = INDEX.replace(struct.pack("<2i2q", 3, 5, 0, 6), struct.pack("<2i2q", -3, 11, 0, -6))
LATEST = "latest_checkpointed_iteration.txt"
# An iteration that folders of checkpoints have beside what is wrong with them.
SAVED = "iter_0000002/empty"
FILES = {
    "chats.jsonl": "{}",
    "three": "20 20 24",
    "sixty": "30 30",
    "words": "many small words",
    "object": '{"lengths": [32, 32]}',
    "negative": "-10 74",
    "blank": " ",
    "blank.json": '{"train": " ", "valid": null, "test": null}',
    "numbers.json": '{"train": 5, "valid": null, "test": null}',
    "gone.json": '{"train": ["0.5", "/gone"], "valid": null, "test": null}',
    "vocab.json": '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}',
    "merges.txt": "#version: 0.2\na b\n",
    "broken/tokenizer.json": '{"version": "1.0", "model"',
    # Data sets: names, an index and its tokens.
    "data.idx": INDEX,
    "data.bin": bytes(16),
    "text.idx": b"text " * 20,
    "text.bin": bytes(16),
    "short_index.idx": INDEX[:60],
    "short_index.bin": bytes(16),
    "short_data.idx": INDEX,
    "short_data.bin": bytes(10),
    "old.idx": INDEX.replace(struct.pack("<Q", 1), struct.pack("<Q", 7), 1),
    "old.bin": bytes(16),
    "lonely.idx": INDEX,
    "negative_lengths.idx": NEGATIVE,
    "negative_lengths.bin": bytes(16),
    "beyond.idx": INDEX,
    "beyond.bin": struct.pack("<8H", *range(197, 205)),
    # Checkpoints.
    f"words_for_a_number/{LATEST}": "three",
    f"gone/{LATEST}": "7",
    f"half/{LATEST}": "4",
    f"garbage/{LATEST}": "4",
    f"words_for_a_number/{SAVED}": "",
    f"gone/{SAVED}": "",
    f"half/{SAVED}": "",
    f"garbage/{SAVED}": "",
    f"untracked/{SAVED}": "",
    "half/iter_0000004/.metadata": "garbage",
    **{f"garbage/iter_0000004/{name}": "garbage" for name in (".metadata", "metadata.json", "common.pt")},
}


@pytest.fixture(scope="module")
def folder(launch, tmp_path_factory):
    """Files of every kind, and a checkpoint in the folder `trained`."""
    folder = write_files(tmp_path_factory.mktemp("files"), FILES)
    os.mkfifo(folder / "pipe")
    (folder / "list_of_one").write_text(f"{folder}/data")
    (folder / "list").write_text(f"0.5 {folder}/data 0.5 {folder}/short_data")
    saved = [*TINY_GPT, "--mock-data", "--train-iters", "1", "--save-interval", "1"]
    for name, flags in (("trained", ()), ("without_optimizer", ("--no-save-optim",))):
        launch(1, [*saved, "--save", folder / name, *flags]).check()
    for name in ("cut_short", "zeroed", "without_metadata"):
        shutil.copytree(folder / "trained", folder / name)
        longest = max((folder / name / "iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
        if name == "cut_short":
            os.truncate(longest, longest.stat().st_size // 2)
        elif name == "zeroed":
            longest.write_bytes(bytes(longest.stat().st_size))
    (folder / "without_metadata" / "iter_0000001" / ".metadata").unlink()
    return folder


@pytest.fixture
def start(launch, folder):
    """Starts a training script with flags as in the tables."""

    def start(flags, **options):
        script = ROOT / "pretrain_hybrid.py" if flags.startswith("hybrid ") else PRETRAIN
        ranks = 2 if flags.startswith("ranks=2 ") else 1
        words = flags.removeprefix("ranks=2 ").removeprefix("hybrid ").replace("{}", str(folder)).split()
        return launch(ranks, [*TINY_GPT, *words], script, **options)

    return start


@pytest.mark.parametrize("flags, sentence", CASES)
def test_one_sentence(start, folder, flags, sentence):
    sentence = sentence.strip()
    job = start(flags)
    (printed,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert job.code == 2 and "Traceback (most" not in job.log, job.log[-2000:]
    assert sentence.replace("{}", str(folder)) in printed and printed.endswith((".", "?"))


@pytest.mark.parametrize("name", ["half", "without_metadata"])
def test_a_checkpoint_without_metadata_ends_with_one_sentence(start, folder, name):
    """torch logs a traceback before."""
    job = start(f"{MOCK}--load {folder / name}")
    last = job.log.splitlines()[-1]
    assert job.code == 2 and last.startswith(f"error: loading the checkpoint in {folder / name} failed: "), last


@pytest.mark.parametrize("flags, warned", [("--load {}/none", True), ("--load {}/new --save {}/new/", False)])
def test_a_load_without_a_checkpoint_is_warned_of(start, flags, warned):
    """But for the first start of a job that saves there."""
    job = start(f"{MOCK}{flags} --save-interval 9 --train-iters 1").check()
    sentence = "none holds no checkpoint, so training starts from random weights: there is no such folder."
    assert (sentence in job.log) == warned, job.log[-4000:]


def test_a_script_that_is_no_program_is_one_sentence(launch, folder):
    job = launch(2, [folder / "words"], script=ROOT / "megatron" / "seq1f1b" / "__main__.py")
    last = job.log.splitlines()[-1]
    assert job.code == 2 and "Traceback" not in job.log
    assert (
        last
        == f"error: {folder / 'words'}: it is not a Python program: line 1: invalid syntax; name the training script."
    )


@pytest.mark.parametrize("flags, sentence", [("", "an argument is empty"), ("--data-path", "--data-path has no value")])
def test_an_empty_argument_is_one_sentence(launch, flags, sentence):
    """As of a variable of the shell that is not set."""
    job = launch(1, [*TINY_GPT, *flags.split(), ""])
    assert job.code == 2 and job.log.splitlines()[-1].startswith(f"error: {sentence}"), job.log[-2000:]


def test_a_path_that_is_no_text_is_one_sentence(launch, folder):
    """Its bytes stand in the file with the traceback, too."""
    job = launch(1, [*TINY_GPT, "--data-path", os.fsdecode(b"caf\xe9")])
    last = job.log.splitlines()[-1]
    assert job.code == 2 and "Traceback" not in job.log and last.startswith("error: reading the data failed: One or"), (
        last
    )


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"RANK": "7"}, "RANK=7 in the environment must be below WORLD_SIZE=1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment is not a whole number from 0 on; what starts the ranks"),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT=tcp://10.0.0.1:80 in the environment is not a whole"),
    ],
    ids=["rank", "local-rank", "port"],
)
def test_a_wrong_environment_is_one_sentence(start, variables, sentence):
    job = start(MOCK, env=variables)
    assert job.code == 2 and f"error: {sentence}" in job.log.splitlines()[-1], job.log[-2000:]


def test_a_port_that_another_program_holds_is_one_sentence(start):
    with socket.create_server(("localhost", 0)) as holder:
        port = holder.getsockname()[1]
        job = start(f"ranks=2 {MOCK}", env={"MASTER_PORT": str(port)})
    assert job.code == 2 and job.log.startswith(f"error: MASTER_PORT={port} is in use on "), job.log[-2000:]
    assert job.log.count("\n") == 1


def test_a_vision_tower_ends_the_first_step_with_a_sentence(launch):
    """A model that shows only when it is built that its sequences cannot be cut."""
    flags = [*TINY_GPT, "--mock-data", "--eval-interval", 9, "--pipeline-model-parallel-size", 2]
    script = Path(__file__).parent / "scripts" / "vision_script.py"
    job = launch(2, [script, *flags, "--sequence-splits", 4], script=ROOT / "megatron" / "seq1f1b" / "__main__.py")
    last = job.log.splitlines()[-1]
    assert job.code == 2 and "Traceback" not in job.log, job.log[-4000:]
    assert last.startswith("error: ") and "vision_model.layers.0.self_attention is a SelfAttention" in last
    assert "whose tokens need later ones (an encoder, a vision tower)" in last and "drop --sequence-splits" in last
