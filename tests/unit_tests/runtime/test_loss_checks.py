"""Megatron's checks of the loss are made once for a micro-batch, on its sum."""

from functools import partial

import pytest
import torch
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from support.one_rank import Stage, executor, run


@pytest.fixture
def machine(alone):
    destroy_rerun_state_machine()  # Megatron makes one at the first call
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


def step(seen, losses, data_iterator, model):
    """A step whose loss function checks twice, as Megatron's do; `losses` are those of the segments in turn."""
    output = model(next(data_iterator)["tokens"])

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


@pytest.mark.parametrize("k, expected", [(1, [1.0, 2.0]), (2, [3.0, 7.0])])
def test_a_micro_batch_is_checked_once(machine, k, expected):
    seen = []
    run(executor(k=k), Stage(), num_microbatches=2, step=partial(step, seen, iter([1.0, 2.0, 3.0, 4.0])))
    assert seen == [(kind, value) for value in expected for kind in ("isnan", "isinf")]
    assert "validate_result" not in vars(machine)


def test_a_nan_loss_ends_the_step_and_names_the_segment(machine):
    losses = iter([1.0, 2.0, 3.0, float("nan")])
    with pytest.raises(RuntimeError, match="the loss isnan") as failure:
        run(executor(), Stage(), num_microbatches=2, step=partial(step, [], losses))
    assert "the loss isnan in micro-batch 1, of its segments in [1]" in failure.value.__notes__
    assert "validate_result" not in vars(machine)
