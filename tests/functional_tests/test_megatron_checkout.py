"""A clone of Megatron-LM before the installed Megatron on PYTHONPATH: its scripts train on segments, and checkpoints of
either go on in the other.

Run by `bash scripts/test_megatron.sh CHECKOUT`, which names the clone in MEGATRON_CHECKOUT.
"""

import os
from pathlib import Path

import pytest

from support.files import write_conversations, write_files
from support.launch import PRETRAIN, ROOT, TINY_GPT, python_path, torchrun

CHECKOUT = Path(os.environ.get("MEGATRON_CHECKOUT", ""))
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not CHECKOUT.name, reason="needs a clone: bash scripts/test_megatron.sh CHECKOUT"),
]

OVERLAY = ROOT / "megatron" / "seq1f1b" / "__main__.py"
GPT = CHECKOUT / "pretrain_gpt.py"
HYBRID = CHECKOUT / "pretrain_hybrid.py"
PIPELINE = ("--pipeline-model-parallel-size", "2", "--transformer-impl", "local")
MODEL = (*TINY_GPT, *PIPELINE, "--train-iters", "4", "--eval-interval", "4", "--untie-embeddings-and-output-weights")
WITHOUT_LAYERS = MODEL[2:]  # a pattern has their number
SAVES = ("--ckpt-format", "torch_dist", "--save-interval", "2")
FOUR = "--sequence-splits 4"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
PREDICTION = "--mtp-num-layers 1 --position-embedding-type rope"
RECURRENT = (
    "--hybrid-layer-pattern G-|*M --swiglu --disable-bias-linear --position-embedding-type rope "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 16 "
    "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
)
DATASETS = """
import json

def load_dataset(_, data_files, split):
    return [json.loads(line) for line in open(data_files)]
"""
# The script, the flags of both runs, those of ours.
RUNS = {
    "gpt": (GPT, MODEL, "", FOUR),
    "gpt, zero bubble": (GPT, MODEL, "", f"{FOUR} --pipeline-schedule zb-h1"),
    "experts": (GPT, MODEL, EXPERTS, FOUR),
    "prediction": (GPT, MODEL, PREDICTION, FOUR),
    "hybrid": (HYBRID, WITHOUT_LAYERS, "--hybrid-layer-pattern *-*-|*-*-", FOUR),
    "recurrent": (HYBRID, WITHOUT_LAYERS, RECURRENT, FOUR),
}


@pytest.mark.parametrize("name", RUNS)
def test_its_own_scripts_train_on_segments_as_they_are(launch, name):
    script, model, flags, ours = RUNS[name]
    shared = [script, *model, "--mock-data", *flags.split()]
    own = launch(2, shared, script=OVERLAY).check()
    cut = launch(2, [*shared, *ours.split()], script=OVERLAY).check()
    assert len(own.losses()) == 4
    assert cut.losses() == pytest.approx(own.losses(), abs=1e-5)


def test_its_own_script_fine_tunes_on_segments(tmp_path):
    """Megatron reads conversations by the package `datasets`, which need not be here."""
    write_files(tmp_path, {"packages/datasets.py": DATASETS})
    data = ("--split", "80,10,10", "--eval-iters", "1", "--no-create-attention-mask-in-dataloader")
    flags = [GPT, *MODEL, *data, *write_conversations(tmp_path)]
    environment = {"PYTHONPATH": python_path(tmp_path / "packages", ROOT)}

    def trained(*more):
        return torchrun(Path("megatron.seq1f1b"), 2, [*flags, *more], env=environment, options=("-m",)).check()

    own = trained("--pipeline-schedule", "1f1b")
    cut = trained(*FOUR.split())
    assert len(own.losses()) == 4
    assert cut.losses() == pytest.approx(own.losses(), abs=1e-5)


@pytest.mark.parametrize("saves_in_clone", [True, False], ids=["from it", "to it"])
def test_a_checkpoint_goes_on_in_the_other_megatron(launch, tmp_path, saves_in_clone):
    """With the optimizer; by the script of the clone there, by ours with the installed Megatron."""
    flags = [*MODEL, "--mock-data", *SAVES, *FOUR.split()]

    def trained(in_clone, *more):
        if in_clone:
            return launch(2, [GPT, *flags, *more], script=OVERLAY).check()
        return torchrun(PRETRAIN, 2, [*flags, *more], env={"PYTHONPATH": str(ROOT)}).check()

    saved = trained(saves_in_clone, "--save", tmp_path)
    loaded = trained(not saves_in_clone, "--load", tmp_path, "--ckpt-step", "2")
    assert loaded.losses() == pytest.approx(saved.losses()[2:], abs=1e-5)
