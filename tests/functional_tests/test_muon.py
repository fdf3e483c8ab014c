"""Muon, of the package emerging-optimizers (pip install .[muon]): its runs go on with segments, in any order and place
of chunks."""

from importlib.util import find_spec

import pytest

from support.launch import TINY_GPT
from support.on_ranks import few_of

pytestmark = pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed")

MODEL = (*TINY_GPT, "--mock-data", "--train-iters", "4", "--untie-embeddings-and-output-weights")
PIPELINE = (*MODEL, "--pipeline-model-parallel-size", "2", "--ckpt-format", "torch_dist")
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2 --sequence-splits 2"
WAYS = {
    "segments": "--sequence-splits 4",
    "zero bubble": "--sequence-splits 3 --pipeline-schedule zb-h1",
    "breadth-first": f"{CHUNKS} --pipeline-schedule breadth-first",
    "V": f"{CHUNKS} --pipeline-schedule auto --pipeline-placement v",
}
# Among data-parallel ranks, of which there is one here, each keeps the state of some layers; that is for 16 bits.
KINDS = {"muon": "--optimizer muon", "dist_muon": "--optimizer dist_muon --bf16"}


@pytest.fixture(scope="module", params=few_of(KINDS, ["muon"]))
def saved(request, launch, tmp_path_factory):
    """The flags of the optimizer, the checkpoint of Megatron's own 1F1B after two steps, and its losses after it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = KINDS[request.param].split()
    job = launch(2, [*PIPELINE, *flags, "--save", folder, "--save-interval", "2"]).check()
    return flags, folder, job.losses()[2:]


@pytest.mark.parametrize("name", few_of(WAYS, ["breadth-first", "V"]))
def test_a_run_goes_on_with_segments(launch, saved, name):
    flags, folder, expected = saved
    loaded = ("--load", folder, "--ckpt-step", "2")
    job = launch(2, [*PIPELINE, *flags, *WAYS[name].split(), *loaded]).check()
    # Muon orthogonalises in bf16, where another order of sums shows in the fifth digit.
    assert job.losses() == pytest.approx(expected, rel=1e-4 if "--bf16" in flags else 2e-5)


def test_a_partitioned_state_is_refused(launch):
    flags = f"--optimizer muon --use-distributed-optimizer {CHUNKS} --pipeline-schedule breadth-first --partition-state"
    job = launch(2, [*PIPELINE, *flags.split()])
    assert job.code and "error: --optimizer other than adam, sgd keeps parameters in an order of its own; " in job.log
