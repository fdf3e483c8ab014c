"""Wrappers of functions of Megatron's training loop."""

from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from megatron.core import parallel_state

from megatron.seq1f1b.launch.training_loop import log
from megatron.seq1f1b.launch.training_loop.checkpoints import Checkpoints
from megatron.seq1f1b.launch.training_loop.log import IterationLog
from megatron.seq1f1b.runtime import Reading
from megatron.seq1f1b.runtime.segments.segmentation import StepDocuments

LINE = (
    " [2026-01-01 00:00:00.000000] iteration        3/       5 | consumed samples: 24 | "
    "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 1.5 | "
    "learning rate: 1.0E-03 | global batch size:     8 | lm loss: 4.8 |"
)


def log_of(documents=None, **args) -> IterationLog:
    recorder = SimpleNamespace(reading=lambda: None)
    executor = SimpleNamespace(segmentation=SimpleNamespace(documents_of_step=documents), recorder=recorder)
    return IterationLog(lambda: Namespace(**args), lambda: executor)


def test_an_iteration_shows_tokens_bubbles_and_memory(monkeypatch):
    readings = [Reading(0.3, 0.4, 2**20), Reading(0.2, 0.3, 2**21)]
    written, lines = {}, []
    monkeypatch.setattr(log, "_of_all_stages", lambda reading: readings)
    monkeypatch.setattr(log, "_write", lambda values, iteration: written.update(values, iteration=iteration))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cuda")
    args = {"seq_length": 64, "world_size": 2}
    for message in (LINE, "something else"):
        log_of(**args, tensorboard_log_interval=1).print_rank_last(lines.append, message)
    line, other = lines
    assert other == "something else" and line.startswith(LINE)
    assert " tokens/s per GPU: 512.0 |" in line
    assert "bubble ratio by pipeline rank (%): 25.0 50.0 |" in line
    assert "peak activations by pipeline rank (MB): 1.0 2.0 |" in line
    assert written["bubble-ratio"] == pytest.approx(0.375) and written["iteration"] == 3
    assert written["bubble-ratio/pipeline-rank-1"] == pytest.approx(0.5)
    assert written["peak-activation-bytes/pipeline-rank-1"] == 2**21
    written.clear()
    log_of(**args, tensorboard_log_interval=0).print_rank_last(lines.append, LINE)  # Megatron's value without writers
    assert lines[-1] == line and not written


@pytest.mark.parametrize(
    "log_interval, iteration, prints_besides", [(1, 1, False), (1, 8, False), (10, 1, True), (10, 30, False)]
)
def test_the_first_iteration_is_printed_within_an_interval(log_interval, iteration, prints_besides):
    """Megatron keeps a loss that it printed early for the next line, which would show the mean of both."""
    upstream = Mock()
    training_log = log_of(log_interval=log_interval, curr_iteration=iteration - 1).training_log
    training_log(upstream, {"lm loss": 1}, {}, is_first_iteration=True)
    upstream.assert_called_once_with({"lm loss": 1}, {}, is_first_iteration=prints_besides)


def test_documents_and_micro_batches_are_those_of_the_step(alone, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda: torch.distributed.group.WORLD)
    for documents, counted, scale in ((None, (7.0, 50.0), 0.5), (StepDocuments(4, [3, 5, 1]), (9.0, 35.0), 0.25)):
        found = log_of(documents, curr_iteration=0)
        assert found.count_documents(lambda: (7.0, 50.0)) == counted
        assert found.report_experts(lambda tracker, scale, iteration: (scale, iteration), None, 0.5, 3) == (scale, 3)


@pytest.mark.parametrize(
    "saved_size, size, way_out", [(1, 2, "give 1, or"), (2, 1, "give more than 1, or"), (2, 4, "")]
)
def test_a_checkpoint_of_experts_in_another_form_is_refused(saved_size, size, way_out):
    """Of all experts on one rank, or of some on each; unless the state of the optimizer is left out."""
    of_run = {"load": "/saved", "finetune": False, "use_distributed_optimizer": True, "num_experts": 4}
    args = Namespace(**of_run, optimizer="adam", no_load_optim=False, expert_model_parallel_size=size)
    saved = {"args": Namespace(optimizer="adam", no_save_optim=False, expert_model_parallel_size=saved_size)}
    upstream = Mock(return_value={"distrib_optim_sharding_type": "any"})
    checkpoints = Checkpoints(lambda: args)
    if way_out:
        with pytest.raises(
            ValueError, match=f"was saved with --expert-model-parallel-size {saved_size}, .*; {way_out}"
        ):
            checkpoints.metadata(upstream, preloaded_state_dict=saved)
        args.no_load_optim = True
    assert checkpoints.metadata(upstream, preloaded_state_dict=saved) == upstream.return_value


@pytest.mark.parametrize(
    "saved_with, flags, named",
    [
        ({"optimizer": "adam"}, {"optimizer": "sgd"}, "--optimizer adam"),
        ({"optimizer": "adam"}, {"optimizer": "muon"}, "--optimizer adam"),
        ({"optimizer": "muon"}, {"optimizer": "adam"}, "--optimizer muon"),
        (
            {"optimizer": "muon", "muon_scalar_optimizer": "adam"},
            {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
            "--muon-scalar-optimizer adam",
        ),
        (
            {"optimizer": "adam", "muon_scalar_optimizer": "adam"},
            {"optimizer": "adam", "muon_scalar_optimizer": "lion"},
            None,
        ),
        ({"optimizer": None}, {"optimizer": "muon"}, None),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved_with, flags, named):
    of_run = {"load": "/saved", "finetune": False, "use_distributed_optimizer": False, "num_experts": None}
    of_run |= {"use_layer_wise_distributed_optimizer": False, "no_load_optim": False}
    args = Namespace(**of_run, **flags)
    saved = {"args": Namespace(**saved_with, no_save_optim=False)}
    upstream = Mock(return_value={})
    checkpoints = Checkpoints(lambda: args)
    if named is not None:
        with pytest.raises(ValueError, match=f"was saved with {named}; give that, or go on .* with --no-load-optim"):
            checkpoints.metadata(upstream, preloaded_state_dict=saved)
        args.no_load_optim = True
    assert checkpoints.metadata(upstream, preloaded_state_dict=saved) == {}


def test_a_checkpoint_at_which_megatron_exits_is_an_error():
    with pytest.raises(RuntimeError, match="cannot load /saved; what it printed last is the reason"):
        Checkpoints(lambda: Namespace(load="/saved")).load(Mock(side_effect=SystemExit))
