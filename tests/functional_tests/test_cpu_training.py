"""Megatron's own training loop and schedules, on CPU tensors and gloo."""

import pytest

from support.files import write_corpus
from support.launch import ITERATIONS, PRETRAIN, ROOT, TINY_GPT, torchrun
from support.on_ranks import few_of

MOCK = (*TINY_GPT, "--mock-data")

LAYOUTS = {
    "stock-attention": (1, "--attention-backend local"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "dp2-overlap": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective",
    ),
}
# With the rest of them, these have all that Megatron redirects.
FEW = ("stock-attention", "pp2-vpp2", "tp2-pp2", "dp2-overlap")


@pytest.fixture(scope="module")
def weights(launch, tmp_path_factory):
    """Flags to start from the same weights: random ones depend on the layout of the ranks."""
    path = tmp_path_factory.mktemp("weights")
    launch(1, [*MOCK, "--train-iters", 1, "--save", path, "--save-interval", 1]).check()
    return ["--load", path, "--finetune"]


@pytest.fixture(scope="module")
def evaluated():
    return ["--eval-interval", 5, "--eval-iters", 2]


@pytest.fixture(scope="module")
def reference(launch, weights, evaluated):
    """The run on one rank."""
    return launch(1, [*MOCK, *weights, *evaluated]).check()


def test_loss_falls(reference):
    losses = reference.losses()
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("layout", few_of(LAYOUTS, FEW))
def test_layout_trains_like_one_rank(launch, weights, evaluated, reference, layout):
    ranks, flags = LAYOUTS[layout]
    job = launch(ranks, [*MOCK, *weights, *evaluated, *flags.split()]).check()
    assert job.losses() == pytest.approx(reference.losses(), abs=1e-5)
    validation = reference.losses("lm loss value")
    assert validation
    assert job.losses("lm loss value") == pytest.approx(validation, abs=1e-5)


def test_bf16(launch, weights, reference):
    job = launch(2, [*MOCK, *weights, "--bf16", "--use-distributed-optimizer"]).check()
    assert job.losses() == pytest.approx(reference.losses(), abs=0.02)
    assert job.losses() != reference.losses()


@pytest.mark.parametrize(
    "flags",
    [
        "--hidden-dropout 0.1",
        pytest.param("--use-distributed-optimizer", marks=pytest.mark.exhaustive),
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16",
    ],
)
def test_checkpoint_resumes_exactly(launch, tmp_path, flags):
    flags = [*MOCK, *flags.split(), "--save", tmp_path, "--load", tmp_path]
    whole = launch(2, [*flags, "--save-interval", 2, "--exit-interval", ITERATIONS]).check().losses()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = launch(2, [*flags, "--save-interval", 100]).check().losses()
    assert len(whole) == ITERATIONS
    # To the last digit that is printed
    assert rest == pytest.approx(whole[2:], abs=3e-6)


@pytest.mark.exhaustive
def test_checkpoints_are_saved_by_a_new_python_as_on_a_gpu(tmp_path):
    """It imports the training script, too."""
    script = ROOT / "tests" / "functional_tests" / "scripts" / "spawning_script.py"
    flags = [*MOCK, "--sequence-splits", 2, "--save", tmp_path, "--save-interval", 2, "--train-iters", 2]
    torchrun(script, 1, flags, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}).check()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_recompute_repeats_dropout(launch):
    """Also inside tensor parallelism, where upstream keeps a random state of its own."""
    flags = [*MOCK, "--tensor-model-parallel-size", 2]
    flags += ["--attention-dropout", 0.2, "--hidden-dropout", 0.2]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    stored = launch(2, flags).check()
    assert launch(2, [*flags, *recompute.split()]).check().losses() == stored.losses()
    assert "CPU RNG state changed" not in stored.log


def test_indexed_data_and_blends(launch, tmp_path):
    a, b = (write_corpus(tmp_path / name, [[token] * 100] * 100) for name, token in (("a", 5), ("b", 9)))
    data = ["--data-path", 0.3, a, 0.7, b, "--split", "80,10,10"]
    cache = ["--data-cache-path", tmp_path / "cache"]
    training = ["--train-iters", 10, "--lr", 1e-2, "--eval-iters", 1, "--eval-interval", 5]
    job = launch(1, [*TINY_GPT, *data, *cache, *training]).check()
    # Two tokens, each followed by itself, are soon learnt.
    losses = job.losses()
    assert losses[-1] < losses[0] / 2
    assert job.losses("lm loss value")


@pytest.mark.exhaustive
def test_under_torchrun():
    """The command that a user types, without any of our flags; test_launch_scripts.py has it with some."""
    job = torchrun(PRETRAIN, 2, [*MOCK, "--pipeline-model-parallel-size", 2]).check()
    assert len(job.losses()) == ITERATIONS
    assert job.log.count("No GPU is visible") <= 1
