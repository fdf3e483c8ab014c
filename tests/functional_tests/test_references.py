"""Programs that call a reference before their model, as preference losses do, on segments: losses and gradients are
those of one stage with whole sequences, by Megatron's own schedule.

The forward step is in the manner of ms-swift's for DPO: stages hand on both outputs in one tensor.
"""

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.enums import AttnMaskType

import megatron.seq1f1b
from functional_tests.equality.cases import Layout
from functional_tests.equality.layout import build, groups_of, has_loss, named, use_ranks
from functional_tests.equality.models import VOCABULARY, Model
from functional_tests.programs.program import unwrapped
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import ScheduleChoice
from support.on_ranks import on_ranks

LENGTHS = (24, 10, 17)  # of the sequences of each micro-batch
LAYOUTS = (Layout(pipeline=2), Layout(pipeline=2, chunks=2))


class Batches:
    """Pairs of a chosen and a rejected sequence."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = [torch.randint(VOCABULARY, (2, length), generator=generator) for length in LENGTHS]

    def __iter__(self):
        return iter(self._tokens)


class Adapters:
    """A change to every feed-forward layer of a model that can be switched off."""

    def __init__(self, chunks: list) -> None:
        self._are_on = True
        for layer in (layer for chunk in chunks for layer in unwrapped(chunk).decoder.layers):
            layer.mlp.register_forward_hook(self._change)

    @contextmanager
    def off(self):
        were_on = self._are_on
        self._are_on = False
        yield
        self._are_on = were_on

    def _change(self, _, __, output):
        return (output[0] * 1.5, output[1]) if self._are_on else output


def another_model(layout: Layout, chunks: list):
    """The reference of each chunk, and a context around its call."""
    references = [unwrapped(chunk) for chunk in build(Model(), layout)]
    for reference in references:
        reference.requires_grad_(False).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.mul_(1.0 if "norm" in name else 0.7)
    return references, contextmanager(lambda: (yield))


def without_adapters(layout: Layout, chunks: list):
    return [unwrapped(chunk) for chunk in chunks], Adapters(chunks).off


def forward_step(references, around_reference, batches, model):
    tokens = next(batches)
    stage = unwrapped(model)
    reference = references[stage.vp_stage or 0]
    length = tokens.shape[1]
    positions = torch.arange(length).expand(2, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    call = {"labels": tokens.roll(-1, dims=1)}
    arrived = stage.decoder.input_tensor
    with torch.no_grad(), around_reference():
        if arrived is not None:
            reference.set_input_tensor(arrived[: len(arrived) // 2].detach())
        of_reference = reference(tokens, positions, mask, **call)
    if arrived is not None:
        stage.set_input_tensor(arrived[len(arrived) // 2 :])
    output = model(tokens, positions, mask, **call)
    return torch.cat([of_reference, output]), preference_loss


def step_after(calls, references, around_reference, batches, model, calls_of_model=()):
    """In the manner of ms-swift's for KTO: calls of the reference with what each of `calls` makes of the tokens, and of
    the model, without gradients, with that of `calls_of_model`."""
    tokens = next(batches)
    stage = unwrapped(model)
    reference = references[stage.vp_stage or 0]
    outputs = []
    with torch.no_grad(), around_reference():
        for call in calls:
            sequences, start = call(tokens)
            outputs.append(reference(*with_documents(sequences, start), labels=sequences.roll(-1, dims=1)))
    with torch.no_grad():
        for call in calls_of_model:
            sequences, start = call(tokens)
            outputs.append(model(*with_documents(sequences, start), labels=sequences.roll(-1, dims=1)))
    outputs.append(model(*with_documents(tokens, 0), labels=tokens.roll(-1, dims=1)))
    return torch.cat(outputs, dim=1 if stage.post_process else 0), partial(loss_beside_others, tokens.shape[1])


def shorter(tokens):
    return tokens[:, : tokens.shape[1] // 2].flip(1), 0


def in_two_documents(tokens):
    return tokens, tokens.shape[1] // 3


def with_documents(tokens, start):
    """Sequences, their positions, and a mask that hides later tokens and, from those after `start`, the ones before."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    mask[..., start:, :start] = True
    return tokens, torch.arange(length).expand(len(tokens), -1), mask


def loss_beside_others(length, losses):
    others, own = losses.split([losses.shape[1] - length, length], dim=1)
    reward = others.mean() - own.mean(dim=1)
    loss = -torch.nn.functional.logsigmoid(reward).sum()
    return loss, {"loss": loss.detach().clone(), "reward": reward.detach(), "others": others}


def preference_loss(losses):
    chosen, rejected = (losses[:2] - losses[2:]).sum(dim=1)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    return loss, {"loss": loss.detach().clone(), "reward": (chosen - rejected).detach()}


def steps(program, make_reference, layout: Layout, schedule=None):
    """The reports of an evaluation and of a step of a forward step, and the gradients, by name."""
    use_ranks(layout)
    chunks = build(Model(), layout)
    chunks[0].config.variable_seq_lengths = True
    step = partial(
        schedule or get_forward_backward_func(),
        forward_step_func=partial(program, *make_reference(layout, chunks)),
        model=chunks,
        num_microbatches=len(LENGTHS),
        seq_length=1,
        micro_batch_size=2,
        pg_collection=groups_of(layout),
    )
    with torch.no_grad():
        reports = step(data_iterator=[iter(Batches()) for _ in chunks], forward_only=True)
    reports += step(data_iterator=[iter(Batches()) for _ in chunks])
    return reports, {name: parameter.main_grad for name, parameter in named(chunks)}


PROGRAMS = {
    "the same sequences": forward_step,
    "shorter ones": partial(step_after, (shorter,)),
    "other documents": partial(step_after, (in_two_documents,)),
    "two calls": partial(step_after, (shorter, in_two_documents)),
    "the model, too": partial(step_after, (shorter,), calls_of_model=(in_two_documents, shorter)),
}


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_a_reference_runs_by_segments(program):
    for make_reference in (another_model, without_adapters):
        reports, gradients = steps(PROGRAMS[program], make_reference, Layout(), forward_backward_no_pipelining)
        assert reports and all((report["reward"].abs() > 1e-3).all() for report in reports)
        for layout in LAYOUTS:
            megatron.seq1f1b.install(segment_tokens=8)
            try:
                found, mine = steps(PROGRAMS[program], make_reference, layout)
            finally:
                megatron.seq1f1b.uninstall()
            assert len(found) == (len(reports) if has_loss(layout) else 0)
            for report, expected in zip(found, reports, strict=False):
                torch.testing.assert_close(report, expected, rtol=1e-10, atol=1e-12)
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)
            assert any(gradient.abs().max() > 1e-3 for gradient in mine.values())


def without_wrappers(batches, model):
    tokens = next(batches)
    return unwrapped(model)(tokens, torch.arange(tokens.shape[1]).expand(2, -1), None), log_probs


def with_wrappers(batches, model):
    tokens = next(batches)
    return model(tokens, torch.arange(tokens.shape[1]).expand(2, -1), None), log_probs


def log_probs(logits):
    return logits.sum(), {"probability": logits.log_softmax(-1)[..., 0]}


def evaluation(program, layout):
    """The reports of an evaluation by segments."""
    use_ranks(layout)
    chunks = build(Model(), layout)
    chunks[0].config.variable_seq_lengths = True
    megatron.seq1f1b.install(segment_tokens=8)
    try:
        with torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=program,
                data_iterator=[iter(Batches()) for _ in chunks],
                model=chunks,
                num_microbatches=len(LENGTHS),
                seq_length=1,
                micro_batch_size=2,
                pg_collection=groups_of(layout),
                forward_only=True,
            )
    finally:
        megatron.seq1f1b.uninstall()


@on_ranks(2)
def test_evaluations_may_call_the_model_without_wrappers():
    for layout in LAYOUTS:
        reports = evaluation(without_wrappers, layout)
        assert [report["probability"].shape[1] for report in reports] == (list(LENGTHS) if has_loss(layout) else [])
        torch.testing.assert_close(reports, evaluation(with_wrappers, layout), rtol=0, atol=0)


def in_every_second_batch(references, around_reference, batches, model):
    tokens = next(batches)
    if tokens.shape[1] != LENGTHS[1]:
        with torch.no_grad():
            references[0](tokens, None, None)
    return model(tokens, None, None), None


def of_other_sequences(references, around_reference, batches, model):
    tokens = next(batches)
    with torch.no_grad():
        references[0](tokens, None, None)
    return model(tokens[:, 1:], None, None), None


def twice_in_every_second_evaluation(batches, model):
    tokens = next(batches)
    output = unwrapped(model)(tokens, None, None)
    if tokens.shape[1] != LENGTHS[1]:
        model(tokens, None, None)
    return output, None


@on_ranks(2)
def test_other_numbers_of_calls_in_an_evaluation_are_refused():
    with pytest.raises(ValueError, match="call their model twice, and those of others once, .* equally often in each"):
        evaluation(twice_in_every_second_evaluation, LAYOUTS[0])


def one_step(program, schedule, lengths_vary, num_microbatches):
    """A step of a forward step with another model as the reference, at two stages."""
    use_ranks(LAYOUTS[0])
    chunks = build(Model(), LAYOUTS[0])
    chunks[0].config.variable_seq_lengths = lengths_vary
    schedule(
        forward_step_func=partial(program, *another_model(LAYOUTS[0], chunks)),
        data_iterator=[iter(Batches())],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=LENGTHS[0],
        micro_batch_size=2,
        pg_collection=groups_of(LAYOUTS[0]),
    )


@on_ranks(2)
def test_a_reference_in_some_micro_batches_is_refused():
    megatron.seq1f1b.install(segment_tokens=8)
    try:
        with pytest.raises(ValueError, match="call different references, or some .* call the same reference in each"):
            one_step(in_every_second_batch, get_forward_backward_func(), lengths_vary=True, num_microbatches=2)
    finally:
        megatron.seq1f1b.uninstall()


@on_ranks(2)
def test_other_sequences_are_refused_if_all_have_one_length():
    halves = Segmentation(2, lambda length, *_: (length // 2, length // 2))
    executor = PipelineExecutor(ScheduleChoice("1f1b"), halves)
    with pytest.raises(ValueError, match="reference and its model for sequences of different sizes; call both for"):
        one_step(of_other_sequences, executor, lengths_vary=False, num_microbatches=1)


def a_model_with_an_encoder_on_rank_1(layout, chunks):
    references, around_reference = another_model(layout, chunks)
    if dist.get_rank() == 1:
        references[0].decoder.layers[0].self_attention.attn_mask_type = AttnMaskType.padding
    return references, around_reference


@on_ranks(2)
def test_a_reference_that_one_rank_cannot_run_is_refused_by_all():
    with pytest.raises(
        ValueError, match=r"^decoder.layers.0.self_attention is a .* with a mask of type padding, whose"
    ):
        steps(forward_step, a_model_with_an_encoder_on_rank_1, LAYOUTS[0], by_segments())
    dist.barrier()


@on_ranks(4)
def test_the_error_of_a_rank_reaches_all_ranks_of_its_replica():
    """It is one of two tensor-parallel ranks of a stage."""
    words = "a .* with a mask of type padding, whose"
    with pytest.raises(ValueError, match=rf"^decoder.layers.0.self_attention is {words}"):
        steps(forward_step, a_model_with_an_encoder_on_rank_1, Layout(pipeline=2, tensor=2), by_segments())
    dist.barrier()


@on_ranks(2)
def test_ranks_exchange_nothing_for_a_reference_that_they_know():
    """Nor for sizes that the calls tell: those of a step say nothing then, and may be others on other replicas."""
    layout = LAYOUTS[0]
    use_ranks(layout)
    chunks = build(Model(), layout)
    chunks[0].config.variable_seq_lengths = True
    step = partial(
        by_segments(),
        forward_step_func=partial(forward_step, *another_model(layout, chunks)),
        model=chunks,
        num_microbatches=len(LENGTHS),
        micro_batch_size=2,
        pg_collection=groups_of(layout),
    )
    numbers = []
    for seq_length in (1, 1, 7):
        with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
            step(data_iterator=[iter(Batches())], seq_length=seq_length)
        numbers.append(exchange.call_count)
    first, *later = numbers
    assert first > 0 and later == [0, 0]


def by_segments():
    return PipelineExecutor(
        ScheduleChoice("1f1b"),
        Segmentation(2, lambda length, *_: (length // 2, length - length // 2), from_variable_calls=True),
        timeout=timedelta(seconds=5),
    )
