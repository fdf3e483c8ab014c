"""Few documents train: a part of --split that gets none of them is left out, or the sentence names it."""

import struct

import pytest

from support.launch import TINY_GPT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Twenty documents of 50 tokens."""
    prefix, count, length = tmp_path_factory.mktemp("corpus") / "text", 20, 50
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack("<H", i % 120) for i in range(count * length)))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, count, count + 1)
        + struct.pack(f"<{count}i", *[length] * count)
        + struct.pack(f"<{count}q", *range(0, 2 * length * count, 2 * length))
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )
    return prefix


@pytest.mark.parametrize(
    "split, evaluations, left_out",
    [
        ("99,1,0", 0, ["valid"]),  # the launchers' split
        ("969,30,1", 1, ["test"]),  # Megatron's
        ("99,1,0", 1, ["valid"]),
        ("100,0,0", 1, []),
    ],
)
def test_a_part_without_documents_is_left_out(launch, corpus, split, evaluations, left_out):
    flags = [*TINY_GPT, "--data-path", corpus, "--split", split, "--eval-iters", evaluations, "--eval-interval", 2]
    job = launch(2, [*flags, "--pipeline-model-parallel-size", 2, "--sequence-splits", 2]).check()
    assert len(job.losses()) == 5
    for part in ("valid", "test"):
        assert job.log.count(f"There is no {part} part") == (part in left_out)


def test_two_small_corpora_are_blended(launch, corpus):
    launch(1, [*TINY_GPT, "--data-path", 0.5, corpus, 0.5, corpus, "--eval-iters", 1, "--eval-interval", 2]).check()


def test_without_documents_to_train_on_all_ranks_end(launch, corpus):
    flags = [*TINY_GPT, "--data-path", corpus, "--split", "1,99,0", "--pipeline-model-parallel-size", 2]
    job = launch(2, flags)
    sentence = f"error: {corpus} has 20 documents, none of them for the train part of --split 1,99,0; give that part"
    assert job.code == 2 and sentence in job.log


def test_a_run_goes_on_for_longer_than_planned(launch, tmp_path):
    """With the flag that the launchers pass."""
    flags = [
        *TINY_GPT,
        "--mock-data",
        "--save",
        tmp_path,
        "--load",
        tmp_path,
        "--save-interval",
        3,
        "--override-opt-param-scheduler",
    ]
    launch(1, [*flags, "--train-iters", 3]).check()
    assert len(launch(1, [*flags, "--train-iters", 6]).check().losses()) == 3
