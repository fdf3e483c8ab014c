"""pretrain_gpt.py on packed documents: our schedules, which make no mask, train like Megatron's own with its mask."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.files import write_conversations, write_corpus
from support.launch import TINY_GPT, Job

END_OF_DOCUMENT = 126  # of a NullTokenizer with --vocab-size 127
PIPELINE = ("--pipeline-model-parallel-size", "2")
EVALUATE = ("--eval-iters", "1", "--eval-interval", "2")
# Three chunks on a rank, which are gathered and reduced in turns.
PARTITIONED = ("--pipeline-model-parallel-layout", "E|t|t|t|t|L", "--use-distributed-optimizer", "--partition-state")
RESET = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
BY_LENGTHS = "--dataloader-inter-document-masking --eod-mask-loss"


@pytest.fixture(scope="module")
def training(launch, tmp_path_factory):
    """Flags for a data set of documents of 1 to 60 tokens, where sequences have 64, and to start from the same weights:
    random ones depend on the layout of the ranks."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 60, size=400)
    documents = [generator.integers(1, 9) * np.arange(length - 1) % END_OF_DOCUMENT for length in lengths]
    corpus = [[*tokens, END_OF_DOCUMENT] for tokens in documents]
    prefix = write_corpus(tmp_path_factory.mktemp("corpus") / "short", corpus)
    flags, weights = [*TINY_GPT, "--data-path", prefix, "--split", "80,20,0"], tmp_path_factory.mktemp("weights")
    launch(1, [*flags, "--train-iters", 1, "--save", weights, "--save-interval", 1]).check()
    return [*flags, *EVALUATE, "--load", weights, "--finetune"]


@pytest.fixture(scope="module")
def masked(launch, training):
    """The losses of Megatron's own attention with a mask of s × s; on one stage, since the middle ones of its own
    schedules get no mask."""
    return launch(1, [*training, *RESET.split(), "--attention-backend", "local"]).check()


def test_documents_matter(launch, training, masked):
    unmasked = launch(1, [*training, *RESET.split()[1:], "--attention-backend", "local"]).check()
    assert unmasked.losses() != pytest.approx(masked.losses(), abs=1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(f"{RESET} --pipeline-schedule 1f1b", marks=pytest.mark.exhaustive),
        f"{RESET} --sequence-splits 4",
        f"{RESET} --sequence-splits 3 --sequence-split-strategy balanced --num-layers-per-virtual-pipeline-stage 1",
        # Every document of this corpus is one of the index, so lengths and tokens mark the same ones.
        f"{BY_LENGTHS} --sequence-splits 4",
    ],
)
def test_losses_are_those_of_megatrons_own_mask(launch, training, masked, flags):
    job = launch(2, [*training, *PIPELINE, *flags.split()]).check()
    assert job.losses() == pytest.approx(masked.losses(), abs=1e-5)
    assert len(job.losses("lm loss value")) >= 2
    assert job.losses("lm loss value") == pytest.approx(masked.losses("lm loss value"), abs=1e-5)


def test_units_of_equal_size(launch, training):
    """Whatever ranks a sequence goes to, and whatever it shares a unit with, losses are those of packed sequences."""
    flags = [*training, *f"{BY_LENGTHS} --reset-position-ids --calculate-per-token-loss --micro-batch-size 1".split()]
    prefix = training[training.index("--data-path") + 1]
    flags += ["--data-path", "0.3", prefix, "0.7", prefix]  # a blend, whose batches have the number of a data set
    whole = launch(2, [*flags, *PIPELINE, "--pipeline-schedule", "1f1b"]).check()
    for ranks, layout in ((2, PIPELINE), (2, ("--overlap-grad-reduce",)), (4, [*PIPELINE, *PARTITIONED])):
        cut = launch(ranks, [*flags, *layout, "--unit-tokens", "24"]).check()
        assert cut.losses() == pytest.approx(whole.losses(), abs=1e-5)
        assert cut.losses("lm loss value") == pytest.approx(whole.losses("lm loss value"), abs=1e-5)


def train_on_conversations(flags: list[str]) -> None:
    """pretrain_gpt.py where the package `datasets`, by which Megatron's SFTDataset reads files, need not be there."""

    def load_dataset(_: str, data_files: str, split: str) -> list[dict]:
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)
    sys.argv[1:] = flags
    import pretrain_gpt

    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})


def test_conversations(launch, tmp_path):
    """--sft packs several into a sequence; segments that follow them give the losses of whole sequences."""
    flags = [*TINY_GPT, *PIPELINE, *EVALUATE, "--split", "80,20,0", *write_conversations(tmp_path)]

    def trained(*more: str) -> Job:
        launch.call(2, train_on_conversations, flags=[*map(str, flags), *more])
        return launch.last

    whole = trained("--pipeline-schedule", "1f1b")
    cut = trained("--sequence-splits", "3", "--sequence-split-strategy", "balanced")
    assert cut.losses() == pytest.approx(whole.losses(), abs=1e-5)
    assert cut.losses("lm loss value") == pytest.approx(whole.losses("lm loss value"), abs=1e-5)
    flags += ["--calculate-per-token-loss", "--micro-batch-size", "1"]
    whole, units = trained("--pipeline-schedule", "1f1b"), trained("--unit-tokens", "16")
    # Not those of evaluation: with --sft and whole sequences Megatron logs the mean of the means of micro-batches.
    assert units.losses() == pytest.approx(whole.losses(), abs=1e-5)
