"""The loss of a micro-batch from losses of its segments."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.loss import LossLedger
from support.linear_stages import Stage, executor, run

BOUNDS = [(0, 5), (5, 6), (6, 12)]


def segments(microbatch):
    return [Segment(microbatch, index, start, end, 12) for index, (start, end) in enumerate(BOUNDS)]


# Reports of the sum `loss` over `count` tokens.
FORMS = {
    "pair": lambda loss, count: torch.stack([loss.detach(), count.double()]),
    "pair of a row": lambda loss, count: torch.stack([loss.detach(), count.double()])[None],
    "the loss": lambda loss, count: loss.detach(),
    "a view of the loss": lambda loss, count: loss.detach().view(1),
    "a copy of the loss": lambda loss, count: loss.detach().clone(),
    "a copy in another precision": lambda loss, count: loss.detach().float(),
    "the loss as a number": lambda loss, count: loss.item(),
    "a mean": lambda loss, count: loss.detach() / count.clamp(min=1),
    "a mean as a number": lambda loss, count: (loss / count.clamp(min=1)).item(),
}


@pytest.mark.parametrize("masked", [(0, 0), (5, 6), (0, 12)], ids=["some", "a segment", "all"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per micro-batch", "per token"])
@pytest.mark.parametrize("form", FORMS)
def test_reports_and_gradients_are_those_of_megatron(form, per_token, masked):
    """Of the third of a step of three whole micro-batches, some of whose tokens are masked."""

    def loss_func(part, output):
        loss, count = (output * mask[:, part]).sum(), mask[:, part].sum().int()
        return loss, count, {"lm loss": FORMS[form](loss, count)}

    def forward(output, function):
        settings = SimpleNamespace(calculate_per_token_loss=per_token, timers=None, grad_scale_func=None)
        loss, _ = schedules.forward_step_calc_loss(
            None, output, function, settings, None, False, 3, store := [], cp_group_size=1, is_last_stage=True
        )
        return loss, store[0]

    torch.manual_seed(0)
    losses = torch.rand(2, 12, dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(2, 12) < 0.7).double()
    mask[:, slice(*masked)] = 0
    whole, expected = forward(losses, partial(loss_func, slice(0, 12)))
    ledger, outputs = LossLedger(per_token), []
    for segment in segments(0):
        part = slice(segment.start, segment.end)
        given = losses[:, part], partial(loss_func, part)
        output, report = forward(*ledger.observe(lambda *_, given=given: given, segment)())
        ledger.reports_of[segment.microbatch].append(report)
        outputs.append(output)
    ready = [ledger.ready_for_backward(output, segment) for output, segment in zip(outputs, segments(0), strict=True)]
    found, wanted = (torch.autograd.grad(each, losses)[0] for each in (ready, [whole]))
    assert torch.allclose(found, wanted, rtol=1e-14, atol=0)
    [ours] = ledger.reports()
    expected = torch.as_tensor(expected["lm loss"], dtype=torch.float64).view(-1)
    assert torch.allclose(ours["lm loss"].double().view(-1), expected, rtol=1e-6 if "precision" in form else 1e-12)
    assert ledger.total_num_tokens(torch.device("cpu")) == mask.sum()


PAIR = "returns .loss, report., an average of unknown weight; .* has to return .loss sum, number of tokens, report."
NO_REPORT = "reports a NoneType; with --sequence-splits its report has to be a dictionary of"


@pytest.mark.parametrize(
    "results, words",
    [
        ([(torch.ones(()), {})], PAIR),
        ([(torch.ones(()), torch.tensor(1), None)], NO_REPORT),
        ([(torch.ones(()), torch.tensor(1), {"a": 1.0, "b": "text"})] * 3, "reports 'b', which is no number"),
        ([(torch.ones(()), torch.tensor(1), {"a": 1.0} | more) for more in ({}, {}, {"b": 2.0})], "reports 'b', which"),
    ],
    ids=["average", "no report", "text", "not in every segment"],
)
def test_a_loss_that_cannot_be_merged_is_refused(results, words):
    ledger = LossLedger(per_token_loss=False)
    with pytest.raises(ValueError, match=words):
        for segment, result in zip(segments(0), results, strict=False):
            given = torch.ones(2), lambda output, result=result: result
            output, loss_func = ledger.observe(lambda *_, given=given: given, segment)()
            ledger.reports_of[segment.microbatch].append(loss_func(output)[2])
        ledger.reports()


@pytest.mark.parametrize("collect", [False, True])
def test_outputs_of_any_structure_are_joined_along_the_tokens(collect):
    """Without a loss function, and by `non_loss_data`."""
    whole = {"logits": torch.rand(2, 12, 5), "pair": (torch.rand(2, 12), "name")}
    ledger = LossLedger(per_token_loss=False)
    for segment in segments(0):
        part = slice(segment.start, segment.end)
        output = {"logits": whole["logits"][:, part], "pair": (whole["pair"][0][:, part], "name")}
        loss_func = (lambda output, non_loss_data: output) if collect else None
        output, function = ledger.observe(lambda *_, given=(output, loss_func): given, segment)()
        assert (function is None) == (not collect)
        ledger.reports_of[segment.microbatch].append(function(output, non_loss_data=True) if collect else output)
    (report,) = ledger.reports()
    assert torch.equal(report["logits"], whole["logits"]) and torch.equal(report["pair"][0], whole["pair"][0])
    assert report["pair"][1] == ["name"] * 3


@pytest.fixture
def machine(alone):
    destroy_rerun_state_machine()  # Megatron makes one at the first call
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


def checking_step(seen, losses, data_iterator, model):
    """A step whose loss function checks twice, as Megatron's do; `losses` are those of the segments in turn."""
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


@pytest.mark.parametrize("k, expected", [(1, [1.0, 2.0]), (2, [3.0, 7.0])])
def test_a_micro_batch_is_checked_once(machine, k, expected):
    seen = []
    run(executor(k=k), Stage(), num_microbatches=2, step=partial(checking_step, seen, iter([1.0, 2.0, 3.0, 4.0])))
    assert seen == [(kind, value) for value in expected for kind in ("isnan", "isinf")]
    assert "validate_result" not in vars(machine)


def test_a_nan_loss_ends_the_step_and_names_the_segment(machine, caplog):
    losses = iter([1.0, 2.0, 3.0, float("nan")])
    with pytest.raises(RuntimeError, match="the loss isnan"):
        run(executor(), Stage(), num_microbatches=2, step=partial(checking_step, [], losses))
    assert "the loss isnan in micro-batch 1, whose segments have [3.0, nan]" in caplog.messages
    assert "validate_result" not in vars(machine)
