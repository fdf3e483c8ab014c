"""A checkpoint of any layout goes on in any other: the losses after it are those of the run that saved it."""

import itertools
from functools import cache

import pytest

from support.launch import ROOT, TINY_GPT

MODEL = (*TINY_GPT, "--mock-data", "--train-iters", "4", "--untie-embeddings-and-output-weights")
HYBRID = ROOT / "pretrain_hybrid.py"
# What the optimizer keeps is saved by parameter, not by the buckets of one layout.
SAVES = ("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


def pipeline(size: int, *flags: str) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(size), *flags)


CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
IN_A_V = ("--pipeline-placement", "v", "--pipeline-schedule", "auto")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
# Ranks and flags: pipeline, tensor and data parallelism, schedules, segments, cuts, chunks, placements.
LAYOUTS = {
    "one rank": (1, ()),
    "Megatron's own 1F1B": (2, pipeline(2)),
    "Seq1F1B": (2, pipeline(2, "--sequence-splits", "4")),
    "zero bubble, even": (
        2,
        pipeline(2, "--pipeline-schedule", "zb-h1", "--sequence-splits", "2", "--sequence-split-strategy", "even"),
    ),
    "chunks": (2, pipeline(2, *CHUNKS, "--sequence-splits", "3")),
    "V": (2, pipeline(2, *CHUNKS, *IN_A_V, "--sequence-splits", "2")),
    "V of uneven chunks": (
        2,
        pipeline(2, "--pipeline-model-parallel-layout", "E|t|ttt|L", *IN_A_V, "--sequence-splits", "3"),
    ),
    "DP 2": (2, ("--sequence-splits", "2")),
    "partitioned state": (4, pipeline(2, *CHUNKS, "--pipeline-schedule", "breadth-first", "--partition-state")),
    "TP 2": (2, (*TENSOR, "--sequence-splits", "2")),
    "four stages": (4, pipeline(4, "--sequence-splits", "2")),
    "TP 2, PP 2": (4, pipeline(2, *TENSOR, "--sequence-splits", "2", "--pipeline-schedule", "breadth-first")),
}
REPRESENTATIVE = [
    *(("Seq1F1B", "partitioned state"), ("partitioned state", "chunks")),
    *(("Seq1F1B", "DP 2"), ("Seq1F1B", "TP 2"), ("chunks", "V"), ("DP 2", "Megatron's own 1F1B")),
    *(("chunks", "V of uneven chunks"), ("V of uneven chunks", "chunks")),
]


@pytest.fixture(scope="module")
def saved(launch, tmp_path_factory):
    """By a layout: the folder of its checkpoint after two iterations, and the losses of the next two."""

    @cache
    def save(name: str):
        folder = tmp_path_factory.mktemp("checkpoint")
        ranks, layout = LAYOUTS[name]
        flags = [*MODEL, *SAVES, *layout, "--save", folder, "--save-interval", "2"]
        losses = launch(ranks, flags).check().losses()
        assert len(losses) == 4
        return folder, losses[2:]

    return save


@pytest.mark.parametrize(
    "source, target",
    [
        pytest.param(source, target, marks=[] if (source, target) in REPRESENTATIVE else pytest.mark.exhaustive)
        for source, target in itertools.product(LAYOUTS, LAYOUTS)
    ],
)
def test_losses_go_on(launch, saved, source, target):
    folder, expected = saved(source)
    ranks, layout = LAYOUTS[target]
    job = launch(ranks, [*MODEL, *SAVES, *layout, "--load", folder, "--ckpt-step", "2"]).check()
    assert job.losses() == pytest.approx(expected, abs=1e-5)


def test_a_partitioned_state_is_saved_in_the_background(launch, saved, tmp_path):
    """While the next steps change the weights."""
    _, expected = saved("partitioned state")
    ranks, layout = LAYOUTS["partitioned state"]
    flags = ("--save", tmp_path, "--save-interval", "2", "--async-save")
    assert launch(ranks, [*MODEL, *SAVES, *layout, *flags]).check().losses()[2:] == expected
    ranks, layout = LAYOUTS["chunks"]
    job = launch(ranks, [*MODEL, *SAVES, *layout, "--load", tmp_path, "--ckpt-step", "2"]).check()
    assert job.losses() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("segments", ["1", pytest.param("4", marks=pytest.mark.exhaustive)])
def test_a_gpt_goes_on_as_a_hybrid_model(launch, saved, segments):
    """Each layer of a GPT is an attention and an MLP there."""
    folder, expected = saved("Seq1F1B")
    layers = TINY_GPT.index("--num-layers")
    flags = [*MODEL[:layers], *MODEL[layers + 2 :], "--hybrid-layer-pattern", "*-*-|*-*-"]
    flags += [*SAVES, *pipeline(2, "--sequence-splits", segments), "--load", folder, "--ckpt-step", "2"]
    job = launch(2, flags, script=HYBRID).check()
    assert job.losses() == pytest.approx(expected, abs=1e-5)
