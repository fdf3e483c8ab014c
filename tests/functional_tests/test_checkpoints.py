"""A checkpoint of any layout goes on in any other: the losses after it are those of the run that saved it. So every
layout also trains like one rank, Megatron's own on the CPU among them."""

import itertools
from functools import cache

import pytest

from support.launch import ROOT, TINY_GPT, python_path, torchrun
from support.on_ranks import few_of

MODEL = (*TINY_GPT, "--mock-data", "--train-iters", "4", "--untie-embeddings-and-output-weights")
EVALUATE = ("--eval-interval", "4", "--eval-iters", "2")
HYBRID = ROOT / "pretrain_hybrid.py"
# What the optimizer keeps is saved by parameter, not by the buckets of one layout.
SAVES = ("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


def pipeline(size: int, *flags: str) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(size), *flags)


CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
IN_A_V = ("--pipeline-placement", "v", "--pipeline-schedule", "auto")
UNEVEN = ("--pipeline-model-parallel-layout", "E|t|ttt|L")
TWO_EVEN = ("--sequence-splits", "2", "--sequence-split-strategy", "even")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
# Ranks and flags: pipeline, tensor and data parallelism, schedules, segments, cuts, chunks, placements.
LAYOUTS = {
    "one rank": (1, ()),
    "Megatron's own 1F1B": (2, pipeline(2)),
    "Seq1F1B": (2, pipeline(2, "--sequence-splits", "4")),
    "zero bubble, even": (2, pipeline(2, "--pipeline-schedule", "zb-h1", *TWO_EVEN)),
    "chunks": (2, pipeline(2, *CHUNKS, "--sequence-splits", "3")),
    "V": (2, pipeline(2, *CHUNKS, *IN_A_V, "--sequence-splits", "2")),
    "V of uneven chunks": (2, pipeline(2, *UNEVEN, *IN_A_V, "--sequence-splits", "3")),
    "DP 2": (2, ("--sequence-splits", "2")),
    "partitioned state": (4, pipeline(2, *CHUNKS, "--pipeline-schedule", "breadth-first", "--partition-state")),
    "TP 2": (2, (*TENSOR, "--sequence-splits", "2")),
    "four stages": (4, pipeline(4, "--sequence-splits", "2")),
    "TP 2, PP 2": (4, pipeline(2, *TENSOR, "--sequence-splits", "2", "--pipeline-schedule", "breadth-first")),
}
# Megatron's own schedules; with 1F1B, these have all that is redirected on a CPU.
OWN = {
    "stock attention": (1, ("--attention-backend", "local")),
    "interleaved": (2, pipeline(2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "TP 2, SP": (2, TENSOR),
    "TP 2, PP 2, whole": (4, pipeline(2, "--tensor-model-parallel-size", "2")),
    "DP 2, overlap": (2, ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-average-in-collective")),
}
ALL = LAYOUTS | OWN | {"bf16": (2, ("--bf16", "--sequence-splits", "2"))}
REPRESENTATIVE = [
    *(("Seq1F1B", "partitioned state"), ("partitioned state", "chunks")),
    *(("Seq1F1B", "DP 2"), ("Seq1F1B", "TP 2"), ("chunks", "V"), ("DP 2", "Megatron's own 1F1B")),
    *(("chunks", "V of uneven chunks"), ("bf16", "bf16")),
    *(("one rank", target) for target in ("stock attention", "interleaved", "TP 2, PP 2, whole", "DP 2, overlap")),
]


@pytest.fixture(scope="module")
def saved(launch, tmp_path_factory):
    """By a layout: the folder of its checkpoint after two iterations, the next losses and those of evaluations."""

    @cache
    def save(name: str):
        folder = tmp_path_factory.mktemp("checkpoint")
        ranks, layout = ALL[name]
        flags = [*MODEL, *SAVES, *EVALUATE, *layout, "--save", folder, "--save-interval", "2"]
        job = launch(ranks, flags).check()
        assert len(job.losses()) == 4 and job.losses("lm loss value")
        return folder, job.losses()[2:], job.losses("lm loss value")

    return save


CASES = [*itertools.product(LAYOUTS, LAYOUTS), *(("one rank", target) for target in OWN), ("bf16", "bf16")]


@pytest.mark.parametrize(
    "source, target",
    [pytest.param(*case, marks=[] if case in REPRESENTATIVE else pytest.mark.exhaustive) for case in CASES],
)
def test_losses_go_on(launch, saved, source, target):
    folder, expected, evaluated = saved(source)
    ranks, layout = ALL[target]
    job = launch(ranks, [*MODEL, *SAVES, *EVALUATE, *layout, "--load", folder, "--ckpt-step", "2"]).check()
    assert job.losses() == pytest.approx(expected, abs=1e-5)
    assert job.losses("lm loss value") == pytest.approx(evaluated, abs=1e-5)


def test_a_partitioned_state_is_saved_in_the_background(launch, saved, tmp_path):
    """While the next steps change the weights."""
    _, expected, _ = saved("partitioned state")
    ranks, layout = LAYOUTS["partitioned state"]
    flags = ("--save", tmp_path, "--save-interval", "2", "--async-save")
    assert launch(ranks, [*MODEL, *SAVES, *layout, *flags]).check().losses()[2:] == expected
    ranks, layout = LAYOUTS["chunks"]
    job = launch(ranks, [*MODEL, *SAVES, *layout, "--load", tmp_path, "--ckpt-step", "2"]).check()
    assert job.losses() == pytest.approx(expected, abs=1e-5)


# The layers of the hybrid model by stages, and flags of both runs.
AS_HYBRID = {
    "whole": ("*-*-|*-*-", pipeline(2, "--pipeline-schedule", "1f1b")),
    "segments": ("*-*-|*-*-", pipeline(2, "--sequence-splits", "4")),
    "zero bubble": ("*-*-|*-*-", pipeline(2, "--pipeline-schedule", "zb-h1", *TWO_EVEN)),
    "chunks": ("*-|*-|*-|*-", pipeline(2, "--sequence-splits", "3")),
    "V": ("*-|*-|*-|*-", pipeline(2, *IN_A_V, "--sequence-splits", "2")),
}


@pytest.mark.parametrize("name", few_of(AS_HYBRID, ["segments", "V"]))
def test_a_gpt_goes_on_as_a_hybrid_model(launch, saved, name):
    """Each layer of a GPT is an attention and an MLP there; its losses are the GPT's to the last digit."""
    folder, _, _ = saved("Seq1F1B")
    pattern, layout = AS_HYBRID[name]
    loaded = (*SAVES, *layout, "--load", folder, "--ckpt-step", "2")
    layers = TINY_GPT.index("--num-layers")
    without_layers = [*MODEL[:layers], *MODEL[layers + 2 :]]
    chunks = CHUNKS if pattern.count("|") > 1 else ()  # of a hybrid model, the pattern has their number
    gpt = launch(2, [*MODEL, *loaded, *chunks]).check()
    hybrid = launch(2, [*without_layers, "--hybrid-layer-pattern", pattern, *loaded], script=HYBRID).check()
    assert len(gpt.losses()) == 2
    assert hybrid.losses() == gpt.losses()


def test_predictions_are_logged_from_a_v(launch, tmp_path):
    """Whose loss is on the first rank, while the last one prints."""
    flags = [*MODEL, *SAVES, "--mtp-num-layers", "1", "--position-embedding-type", "rope"]
    expected = launch(1, [*flags, "--save", tmp_path, "--save-interval", "2"]).check()
    in_a_v = pipeline(2, *CHUNKS, *IN_A_V, "--sequence-splits", "2")
    job = launch(2, [*flags, *in_a_v, "--load", tmp_path, "--ckpt-step", "2"]).check()
    for kind in ("lm loss", "mtp_1 loss"):
        assert len(expected.losses(kind)) == 4
        assert job.losses(kind) == pytest.approx(expected.losses(kind)[2:], abs=1e-5)


@pytest.mark.exhaustive
def test_a_new_python_saves_them_as_on_a_gpu(tmp_path):
    """It imports the training script, too."""
    script = ROOT / "tests" / "functional_tests" / "scripts" / "spawning_script.py"
    flags = [*MODEL, "--sequence-splits", 2, "--save", tmp_path, "--save-interval", 2, "--train-iters", 2]
    torchrun(script, 1, flags, env={"PYTHONPATH": python_path(ROOT, ROOT / "tests")}).check()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
