"""Losses are computed once for each micro-batch, by Megatron's rules."""

from functools import partial

import pytest
import torch
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from support.linear_stages import Stage, executor, run


@pytest.fixture
def machine(alone):
    destroy_rerun_state_machine()  # Megatron makes one at the first call
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


def checking_step(seen, losses, data_iterator, model):
    """A step whose loss function checks twice, as Megatron's do; `losses` are those of the micro-batches in turn."""
    output = model(next(data_iterator))

    def note(kind, result):
        seen.append((kind, float(result)))
        return bool(getattr(torch, kind)(result))

    def loss_func(output):
        loss = 0 * output.sum() + next(losses)
        for kind in ("isnan", "isinf"):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=partial(note, kind), message=f"the loss {kind}", fatal=True
            )
        return loss, torch.tensor(output.numel(), dtype=torch.int), {"loss": loss.detach()}

    return output, loss_func


@pytest.mark.parametrize("k", [1, 2])
def test_a_micro_batch_is_checked_once(machine, k):
    seen = []
    run(executor(k=k), Stage(), num_microbatches=2, step=partial(checking_step, seen, iter([1.0, 2.0])))
    assert seen == [(kind, value) for value in (1.0, 2.0) for kind in ("isnan", "isinf")]


def test_a_nan_loss_ends_the_step(machine):
    losses = iter([1.0, float("nan")])
    with pytest.raises(RuntimeError, match="the loss isnan"):
        run(executor(), Stage(), num_microbatches=2, step=partial(checking_step, [], losses))


@pytest.mark.parametrize("k", [1, 2])
def test_a_sum_of_weights_is_no_number_of_tokens(alone, k):
    """Megatron's sum of numbers of tokens takes no other numbers, and ours would cut them."""

    def step(data_iterator, model):
        output = model(next(data_iterator))
        return output, lambda output: (output.sum(), torch.tensor(2.5), {})

    stage = Stage()
    run(executor(k=k), stage, num_microbatches=2, step=step)
    stage.config.calculate_per_token_loss = True
    with pytest.raises(ValueError, match="number of tokens of type torch.float32, .* divide the loss by the sum"):
        run(executor(k=k), stage, num_microbatches=2, step=step)


REPORTS = {
    "a dictionary": lambda loss: {"loss": loss.detach()},
    "nothing": lambda loss: None,
    "text": lambda loss: {"loss": loss.detach(), "name": "text"},
    "a list": lambda loss: [loss.item(), 3],
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_what_the_program_returns(alone, report):
    def step(data_iterator, model):
        def loss_func(output):
            loss = output.sum()
            return loss, torch.tensor(1), REPORTS[report](loss)

        return model(next(data_iterator)), loss_func

    whole, cut = (run(executor(k=k), Stage(), step=step) for k in (1, 2))
    assert len(whole) == len(cut) == 3
    for of_whole, of_cut in zip(whole, cut, strict=True):
        if isinstance(of_whole, dict):
            assert of_cut.keys() == of_whole.keys() and of_cut.get("name") == of_whole.get("name")
            assert of_cut["loss"] == pytest.approx(of_whole["loss"])
        elif isinstance(of_whole, list):
            assert of_cut == pytest.approx(of_whole)
        else:
            assert of_whole is None and of_cut is None


@pytest.mark.parametrize("collect", [False, True])
def test_what_is_not_a_loss_is_of_whole_sequences(alone, collect):
    def step(data_iterator, model):
        output = {"logits": model(next(data_iterator)), "name": "text"}
        return output, (lambda output, non_loss_data: output) if collect else None

    with torch.no_grad():
        given = {"step": step, "forward_only": True, "collect_non_loss_data": collect}
        whole, cut = (run(executor(k=k), Stage(), **given) for k in (1, 2))
    for mine, wanted in zip(cut, whole, strict=True):
        assert torch.allclose(mine["logits"], wanted["logits"]) and mine["name"] == "text"
