"""Our schedules in a program without Megatron's training loop and arguments (see library_worker.py)."""

from pathlib import Path

import pytest
import torch

from megatron.seq1f1b.schedule import Placement, Shape, build, read_timeline, write_csv

PARTITIONED = {"whole": (), "partitioned": ("partition_state=True",)}
WORKER = Path(__file__).parent / "workers" / "library_worker.py"


def result(launch, path, *options, **environment) -> list[tuple]:
    """(reports, gradients) of each rank."""
    launch(2, [path, *options], script=WORKER, env=environment).check()
    return [torch.load(f"{path}.{rank}") for rank in range(2)]


@pytest.fixture(scope="module")
def megatrons_own(launch, tmp_path_factory):
    return result(launch, tmp_path_factory.mktemp("own") / "own")


@pytest.mark.parametrize(
    "options",
    [
        ["pipeline_schedule=1f1b", "sequence_splits=4"],
        ["sequence_splits=3", "sequence_split_strategy=balanced"],
        ["pipeline_schedule=zb-h1", "sequence_splits=2"],
        ["pipeline_schedule_file=mine.csv", "sequence_splits=2", "pipeline_trace=trace", "pipeline_trace_iterations=1"],
    ],
    ids=" ".join,
)
def test_losses_and_gradients_are_those_without_us(launch, megatrons_own, tmp_path, options):
    write_csv(build("auto", Shape(Placement(2), 3, 2)), tmp_path / "mine.csv")
    for name in ("mine", "trace"):
        options = [option.replace(f"={name}", f"={tmp_path}/{name}") for option in options]
    assert_equal(result(launch, tmp_path / "ours", *options), megatrons_own)
    if any("trace" in option for option in options):
        timeline = read_timeline(tmp_path / "trace" / "iteration-1-pipeline-0.json")
        assert len(timeline.ranks[0]) >= 12


def test_a_function_imported_before_is_ours_too(launch, megatrons_own, tmp_path):
    options = [tmp_path / "ours", "sequence_splits=4", "sequence_split_strategy=even"]
    job = launch(2, options, script=WORKER, env={"IMPORTED_BEFORE": "1"}).check()
    assert job.log.count("steps are run by megatron.seq1f1b: 1f1b, segments: 4") == 1
    assert_equal([torch.load(f"{tmp_path}/ours.{rank}") for rank in range(2)], megatrons_own)


def test_a_loop_that_compiles_megatrons_helpers_does_not_fail(launch, tmp_path):
    """As Megatron-Bridge's does at its start: the wheel of megatron-core has no makefile for it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron.seq1f1b\n"
        "megatron.seq1f1b.install(sequence_splits=2)\n"
        "from megatron.core.datasets.utils import compile_helpers\n"
        "compile_helpers()\n"
    )
    launch(1, script=script).check()


def test_another_install_with_other_keywords_is_refused(launch, tmp_path):
    """As the second of a program and its framework; one without keywords or with the same does nothing."""
    script = tmp_path / "script.py"
    calls = ("sequence_splits=2", "sequence_splits=2", "", "sequence_splits=4")
    script.write_text("from megatron.seq1f1b import install\n" + "".join(f"install({each})\n" for each in calls))
    job = launch(1, script=script)
    assert job.code == 1 and "line 5" in job.log
    assert "ValueError: install was called before with other keywords; call it once" in job.log


def test_uninstall_leaves_megatrons_own_schedules(launch, tmp_path):
    """In what imported the function before, too; another install may then have other keywords."""
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron.core.pipeline_parallel import schedules\n"
        "from megatron.core.pipeline_parallel.schedules import get_forward_backward_func\n"
        "from megatron.seq1f1b import install, uninstall\n"
        "upstream = [get_forward_backward_func]\n"  # in a list, where no name is bound anew
        "uninstall()\n"
        "for segments in (2, 4):\n"
        "    install(sequence_splits=segments)\n"
        "    assert upstream[0] is not get_forward_backward_func is schedules.get_forward_backward_func\n"
        "    uninstall()\n"
        "    assert upstream[0] is get_forward_backward_func is schedules.get_forward_backward_func\n"
    )
    launch(1, script=script).check()


@pytest.fixture(scope="module")
def masked(launch, tmp_path_factory):
    """Megatron's own, with a mask that keeps documents apart."""
    return result(launch, tmp_path_factory.mktemp("masked") / "own", DOCUMENTS="mask")


@pytest.mark.parametrize("documents", ["mask", "cu_seqlens"])
def test_documents_of_a_batch_are_kept_apart(launch, megatrons_own, masked, tmp_path, documents):
    options = ["sequence_splits=3", "sequence_split_strategy=balanced", "keep_documents_apart=True"]
    ours = result(launch, tmp_path / "ours", *options, DOCUMENTS=documents)
    assert_equal(ours, masked)
    assert not torch.allclose(masked[1][0][0]["loss"], megatrons_own[1][0][0]["loss"])


@pytest.mark.parametrize(
    "documents, what",
    [
        ("mask", "the attention mask in the batch of micro-batch 0 is not plain causal attention"),
        ("packed_seq_params", "the model got packed_seq_params, but segments attend across documents"),
    ],
)
def test_documents_that_nobody_spoke_of_are_a_value_error(launch, tmp_path, documents, what):
    job = launch(2, [tmp_path / "refused", "sequence_splits=3"], script=WORKER, env={"DOCUMENTS": documents})
    assert job.code == 1
    sentence = next(line for line in job.log.splitlines() if f"ValueError: {what}" in line)
    assert sentence.endswith("for packed documents give keep_documents_apart, or drop sequence_splits")


def steps_of_adam(launch, path, *options, **environment) -> list[tuple]:
    """(losses and norms, weights, bytes of weights between steps) of each of four ranks after three steps."""
    options = [path, "pipeline_schedule=breadth-first", "sequence_splits=2", *options]
    launch(4, options, script=WORKER, env={"STEPS": "3"} | environment).check()
    return [torch.load(f"{path}.{rank}") for rank in range(4)]


def test_a_partitioned_state_trains_a_program_alike(launch, tmp_path):
    """Losses, norms and weights of three steps of Adam are the same numbers; between them no weights are there."""
    found = [steps_of_adam(launch, tmp_path / name, *more) for name, more in PARTITIONED.items()]
    for (losses, weights, there), (same_losses, same_weights, same_there) in zip(*found, strict=True):
        assert there > 0 == same_there
        assert str(losses) == str(same_losses) and len(losses) == 3
        assert len(weights) > 10 and all(map(torch.equal, weights, same_weights))


def test_a_partitioned_state_adds_up_the_gradients_of_two_calls(launch, tmp_path):
    """In another order than a whole one. Of experts divided among both replicas, no other rank has a share."""
    environment = {"CALLS": "2", "EXPERTS": "2"}
    found = [steps_of_adam(launch, tmp_path / name, *more, **environment) for name, more in PARTITIONED.items()]
    for (losses, _, _), (same_losses, _, _) in zip(*found, strict=True):
        assert [norm for _, norm in losses] == pytest.approx([norm for _, norm in same_losses], rel=1e-5)


def assert_equal(ours: list[tuple], own: list[tuple]) -> None:
    """Results of both ranks."""
    for rank, ((reports, gradients), (own_reports, own_gradients)) in enumerate(zip(ours, own, strict=True)):
        assert len(reports) == len(own_reports) == 3 * rank
        for mine, other in zip(reports, own_reports, strict=True):
            assert torch.allclose(mine["loss"], other["loss"], rtol=1e-10)
        assert gradients.keys() == own_gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient - own_gradients[name]).abs().max() <= 1e-10 * own_gradients[name].abs().max(), name


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("partition_state=True", "partition_state needs DistributedDataParallelConfig("),
        ("sequence_splits=40", "sequence_splits 40 leaves empty segments: seq_length 32 has only 32 pieces"),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error(launch, tmp_path, option, sentence):
    job = launch(2, [tmp_path / "refused", option], script=WORKER)
    assert job.code == 1 and f"ValueError: {sentence}" in job.log
