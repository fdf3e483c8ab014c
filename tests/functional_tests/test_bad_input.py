"""Bad input of a training: for each fault one sentence on rank 0, exit code 2, and no traceback but in a file."""

import argparse
import os
import shutil
import struct
from pathlib import Path

import pytest

from megatron.seq1f1b.arguments.supported import UNSUPPORTED
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
GOOD = [MOCK + SPLIT, MOCK + "--load {}/none", MOCK + SPLIT + "--save {}/new --save-interval 2"]
CHANGED = {
    MOCK + "--distributed-backend nccl": "--distributed-backend nccl becomes gloo on the CPU",
    MOCK + SPLIT + "--flash-attention-version 4": "--flash-attention-version has no effect on the CPU",
    MOCK
    + "--pipeline-schedule gpipe --pipeline-schedule-file {}/four.csv": "takes the place of --pipeline-schedule gpipe",
    MOCK
    + SPLIT
    + "--sequence-split-strategy even --sequence-split-profile {}/none": "--sequence-split-profile has no effect",
}


@pytest.fixture(scope="module")
def folder(launch, tmp_path_factory):
    """Files of every kind, and a checkpoint in the folder `trained`."""
    folder = tmp_path_factory.mktemp("files")
    saved = [MOCK.strip(), "--train-iters", "1", "--save", folder / "trained", "--save-interval", "1"]
    launch(1, [*TINY_GPT, *saved]).check()
    saved[saved.index("--save") + 1] = folder / "without_optimizer"
    launch(1, [*TINY_GPT, *saved, "--no-save-optim"]).check()
    for name in ("cut_short", "zeroed", "without_metadata"):
        shutil.copytree(folder / "trained", folder / name)
        longest = max((folder / name / "iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
        if name == "cut_short":
            os.truncate(longest, longest.stat().st_size // 2)
        elif name == "zeroed":
            longest.write_bytes(bytes(longest.stat().st_size))
    (folder / "without_metadata" / "iter_0000001" / ".metadata").unlink()
    (folder / "chats.jsonl").write_text("{}")
    (folder / "three").write_text("20 20 24")
    (folder / "sixty").write_text("30 30")
    (folder / "words").write_text("many small words")
    (folder / "negative").write_text("-10 74")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text('{"version": "1.0", "model"')
    (folder / "four.csv").write_text(",".join(f"0F{m},0B{m}" for m in range(4)))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 6, 0, 1, 2)
    for name, idx, data in (
        ("data", index, bytes(16)),
        ("text", b"text " * 20, bytes(16)),
        ("short_index", index[:60], bytes(16)),
        ("short_data", index, bytes(10)),
        (
            "negative_lengths",
            index.replace(struct.pack("<2i2q", 3, 5, 0, 6), struct.pack("<2i2q", -3, 11, 0, -6)),
            bytes(16),
        ),
        ("beyond", index, struct.pack("<8H", *range(197, 205))),
    ):
        (folder / f"{name}.idx").write_bytes(idx)
        (folder / f"{name}.bin").write_bytes(data)
    for name, number in (("words_for_a_number", "three"), ("gone", "7"), ("half", "4"), ("garbage", "4")):
        (folder / name / "iter_0000002").mkdir(parents=True)
        (folder / name / "latest_checkpointed_iteration.txt").write_text(number)
    for name in ("half", "garbage"):
        (folder / name / "iter_0000004").mkdir()
        (folder / name / "iter_0000004" / ".metadata").write_text("garbage")
    for name in ("metadata.json", "common.pt"):
        (folder / "garbage" / "iter_0000004" / name).write_text("garbage")
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


@pytest.mark.parametrize("flags", GOOD)
def test_what_is_right_is_not_refused(start, flags):
    start(flags).check()


@pytest.mark.parametrize("flags, sentence", CHANGED.items(), ids=[*CHANGED])
def test_what_is_changed_is_told(start, flags, sentence):
    assert sentence in start(flags).check().log


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"RANK": "7"}, "RANK=7 in the environment must be below WORLD_SIZE=1"),
        ({"MASTER_PORT": "many"}, "connecting the ranks failed: invalid literal for int() with base 10: 'many'"),
    ],
    ids=["rank", "port"],
)
def test_a_wrong_environment_is_one_sentence(start, variables, sentence):
    job = start(MOCK, env=variables)
    assert job.code == 2 and f"error: {sentence}" in job.log.splitlines()[-1], job.log[-2000:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vision_tower_ends_the_first_step_with_a_sentence(launch, ranks):
    """A model that shows only when it is built that its sequences cannot be cut."""
    flags = [*TINY_GPT, "--mock-data", "--eval-interval", 9, "--pipeline-model-parallel-size", ranks]
    script = Path(__file__).parent / "scripts" / "vision_script.py"
    job = launch(ranks, [script, *flags, "--sequence-splits", 4], script=ROOT / "megatron" / "seq1f1b" / "__main__.py")
    last = job.log.splitlines()[-1]
    assert job.code == 2 and "Traceback" not in job.log, job.log[-4000:]
    assert last.startswith("error: ") and "vision_model.layers.0.self_attention is a SelfAttention" in last
    assert "whose tokens need later ones (an encoder, a vision tower)" in last and "drop --sequence-splits" in last


def test_every_flag_of_the_table_is_one_of_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    for rows in UNSUPPORTED.values():
        for row in rows:
            for word in row.feature.split():
                assert not word.startswith("--") or word in known, row.feature
