"""What else of Megatron's training loop meets our schedules: dropout, batches that grow, timers, few documents.

And what a run shows: the block at its start, its lines, TensorBoard and wandb.
"""

import re

import pytest

from support.files import write_corpus
from support.launch import ITERATIONS, TINY_GPT
from support.on_ranks import few_of

PIPELINE = (*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2")
SEGMENTS = ("--sequence-splits", "4")
DROPOUT, OF_ATTENTION = ("--hidden-dropout", "0.2"), ("--attention-dropout", "0.1")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def without(flags: tuple, *names: str) -> list:
    """The flags without those that have these names, and without their values."""
    places = [flags.index(name) for name in names]
    return [flag for index, flag in enumerate(flags) if index not in places and index - 1 not in places]


@pytest.mark.parametrize(
    "flags, ways",
    [
        ([*PIPELINE, *SEGMENTS, *DROPOUT, *OF_ATTENTION], (FULL, [*FULL, "--recompute-keeps-attention"])),
        # Inside tensor parallelism upstream keeps a random state of its own.
        ([*TINY_GPT, "--mock-data", "--tensor-model-parallel-size", "2", *DROPOUT, *OF_ATTENTION], (FULL,)),
    ],
    ids=["ours", "Megatron's own"],
)
def test_the_seed_decides_what_is_dropped_out(launch, flags, ways):
    """Also where it is computed again."""
    stored, other = launch(2, flags).check(), launch(2, [*flags, "--seed", "5"]).check()
    assert len(stored.losses()) == ITERATIONS and stored.losses() != other.losses()
    assert "CPU RNG state changed" not in stored.log
    for recompute in ways:
        assert launch(2, [*flags, *recompute]).check().losses() == stored.losses()


def test_attention_dropout_alone(launch):
    """Masks differ from those of Megatron's own attention, whose random numbers are of whole sequences."""
    without, job = (launch(2, [*PIPELINE, *SEGMENTS, *more]).check() for more in ((), OF_ATTENTION))
    assert job.losses() == pytest.approx(without.losses(), rel=0.02) and job.losses() != without.losses()
    assert job.log.count("attention dropout on a CPU has no fused kernel") == 1


def test_an_evaluation_drops_out_nothing(launch):
    """With weights that do not move."""
    still = [*without(PIPELINE, "--lr"), "--lr", "1e-12", "--train-iters", "1", "--eval-iters", "2", *SEGMENTS]
    with_dropout, without_dropout = (launch(2, [*still, *flags]).check() for flags in (DROPOUT, ()))
    assert with_dropout.losses("lm loss value") == without_dropout.losses("lm loss value") != []
    assert with_dropout.losses() != without_dropout.losses()
    assert with_dropout.losses() == pytest.approx(without_dropout.losses(), rel=0.1)


def test_a_batch_that_grows_and_another_one_in_evaluation(launch):
    """Two, then four micro-batches; three of one sequence in an evaluation. Megatron's log finds its timers. Data
    workers ignore SIGTERM here: they end with the iterators of the last steps, which nothing may keep."""
    flags = without(PIPELINE, "--global-batch-size", "--train-iters", "--eval-iters", "--num-workers")
    flags += ["--train-samples", 24, "--step-batch-size-schedule", "0:4 512:8"]
    flags += ["--eval-interval", 2, "--eval-iters", 2, "--eval-micro-batch-size", 1, "--eval-global-batch-size", 3]
    own = launch(2, [*flags, "--num-workers", 0, "--attention-backend", "local"]).check()
    flags += ["--num-workers", 2, "--exit-signal-handler", "--timing-log-level", 2, "--timing-log-option", "all"]
    ours = launch(2, [*flags, *SEGMENTS]).check()
    assert re.findall(r"global batch size: +(\d+)", ours.log) == ["4", "4", "8", "8"]
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)
    assert ours.losses("lm loss value") == pytest.approx(own.losses("lm loss value"), abs=1e-5) != []
    for name in ("forward-backward", "forward-compute", "backward-compute", "batch-generator"):
        assert re.search(rf"^ +{name}:$", ours.log, re.MULTILINE), name


def test_every_iteration_shows_what_segments_gain(launch, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = [*PIPELINE, *SEGMENTS, "--log-throughput", "--tensorboard-dir", tmp_path / "board"]
    flags += ["--wandb-project", "seq1f1b", "--wandb-exp-name", "tiny", "--wandb-save-dir", tmp_path]
    log = launch(2, flags, env={"WANDB_MODE": "offline"}).check().log

    assert log.count("-- sequence-level pipeline parallelism") == 1
    assert re.search(r"segments +4, balanced: \d+ \d+ \d+ \d+ tokens", log)
    assert re.search(r"^ *schedule +1f1b with segments$", log, re.MULTILINE)
    assert "in-flight microbatches" not in log
    lines = [line for line in log.splitlines() if re.search(r" iteration +\d+/ +3 \|", line)]
    assert len(lines) == 3
    for line in lines:
        ratios = re.search(r"bubble ratio by pipeline rank \(%\): (\S+) (\S+) \|", line)
        assert all(0 < float(share) < 100 for share in ratios.groups())
        assert float(re.search(r"tokens/s per process: (\S+) \|", line)[1]) > 0
        assert re.search(r"peak activations by pipeline rank \(MB\): \S+ \S+ \|", line)

    board = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name in ("tokens-per-second-per-gpu", "bubble-ratio", "bubble-ratio/pipeline-rank-1", "lm loss"):
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3]
    assert board.Scalars("peak-activation-bytes/pipeline-rank-0")[-1].value > 0
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_megatrons_own_schedule_keeps_its_estimates(launch):
    log = launch(2, [*PIPELINE, "--log-throughput"]).check().log
    assert "Number of in-flight microbatches" in log and "-- sequence-level pipeline parallelism" not in log
    assert len(re.findall(r"tokens/s per process: \S+ \|", log)) == 3 and "bubble ratio by" not in log


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Twenty documents of 50 tokens."""
    documents = [[(50 * i + j) % 120 for j in range(50)] for i in range(20)]
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", documents)


@pytest.mark.parametrize(
    "split, evaluations, left_out",
    [
        ("99,1,0", 0, ["valid"]),  # of the launchers
        ("969,30,1", 1, ["test"]),  # of Megatron
        ("100,0,0", 1, []),
    ],
)
def test_a_part_without_documents_is_left_out(launch, corpus, split, evaluations, left_out):
    flags = [*TINY_GPT, "--data-path", corpus, "--split", split, "--eval-iters", evaluations, "--eval-interval", 2]
    job = launch(2, [*flags, "--pipeline-model-parallel-size", 2, "--sequence-splits", 2]).check()
    assert len(job.losses()) == ITERATIONS
    for part in ("valid", "test"):
        assert job.log.count(f"There is no {part} part") == (part in left_out)


def test_without_documents_to_train_on_all_ranks_end(launch, corpus):
    flags = [*TINY_GPT, "--data-path", corpus, "--split", "1,99,0", "--pipeline-model-parallel-size", 2]
    job = launch(2, flags)
    sentence = f"error: {corpus} has 20 documents, none of them for the train part of --split 1,99,0; give that part"
    assert job.code == 2 and sentence in job.log


@pytest.mark.parametrize("stages", few_of((2, 4), (2,)))
def test_skipped_iterations_read_and_save(launch, tmp_path, stages):
    """Stages with several chunks read from several iterators, those in the middle from none."""
    flags = [*TINY_GPT, "--mock-data", "--num-layers", 4, "--pipeline-model-parallel-size", stages, "--train-iters", 4]
    flags += ["--num-virtual-stages-per-pipeline-rank", 2] if stages == 2 else ["--sequence-splits", 2]
    job = launch(stages, [*flags, "--iterations-to-skip", 2, 4, "--save", tmp_path, "--save-interval", 4]).check()
    assert re.findall(r"number of skipped iterations: +(\d+)", job.log) == ["0", "1", "0", "1"]
    skipped = [line for line in job.log.splitlines() if "skipped iterations:   1" in line]
    assert not any("lm loss" in line or "tokens/s" in line for line in skipped)
    assert len(job.losses()) == 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)], ids=["plain", "distributed"])
def test_a_run_goes_on_with_another_learning_rate(launch, tmp_path, flags):
    flags = [*TINY_GPT, "--mock-data", "--save-interval", 1, "--lr-decay-style", "constant", *flags]
    launch(1, [*flags, "--train-iters", 1, "--save", tmp_path]).check()
    flags += ["--load", tmp_path, "--train-iters", 2, "--lr", 2e-3]
    for given, rate in (("--override-opt-param-scheduler", 2e-3), ("--use-checkpoint-opt-param-scheduler", 1e-3)):
        job = launch(1, [*flags, given]).check()
        assert [*map(float, re.findall(r"learning rate: (\S+) \|", job.log))] == [rate]


def test_a_run_goes_on_for_longer_than_planned(launch, tmp_path):
    """With the flag that the launchers pass."""
    flags = [*TINY_GPT, "--mock-data", "--save", tmp_path, "--load", tmp_path, "--save-interval", 2]
    flags.append("--override-opt-param-scheduler")
    launch(1, [*flags, "--train-iters", 2]).check()
    assert len(launch(1, [*flags, "--train-iters", 4]).check().losses()) == 2


def test_a_rejected_loss_ends_with_a_sentence(launch):
    """Megatron computes the step again, and leaves with its own code on all ranks."""
    flags = ["--lr", "1e30", "--sequence-splits", "2", "--pipeline-model-parallel-size", "2", "--mock-data"]
    job = launch(2, [*TINY_GPT, *flags], watched=False)
    (sentence,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert job.codes == (16, 16) and "Traceback" not in job.log
    assert "iteration 2 is NaN, infinite or far too large, and again when it is computed once more" in sentence
    assert "lower --lr 1e+30, and look at" in sentence
