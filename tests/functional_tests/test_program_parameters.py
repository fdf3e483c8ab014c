"""Programs that compute with parameters of their model beside its call, as with a head that they apply by themselves:
losses and gradients are those of one stage with whole sequences, by Megatron's own schedule."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel import ColumnParallelLinear

import megatron.seq1f1b
from functional_tests.equality.cases import Layout
from functional_tests.equality.comparison import each_replica_alone
from functional_tests.equality.layout import build, groups_of, has_loss, named, use_ranks
from functional_tests.equality.models import SEQUENCE, VOCABULARY, Model
from functional_tests.programs.program import unwrapped
from megatron.seq1f1b.process.patches import patched
from support.on_ranks import on_ranks

MICROBATCHES = 3


@dataclass(frozen=True)
class ModelWithHead(Model):
    """On its last stage it has a head, of Megatron's layers, which no forward of the model uses."""

    def build(self, config, is_first, is_last, chunk, groups=None):
        model = super().build(config, is_first, is_last, chunk, groups)
        if is_last:
            head = ColumnParallelLinear(VOCABULARY, 1, config=config, init_method=torch.nn.init.zeros_)
            model.score = head.to(self.dtype)
        return model


def micro_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)


def forward_step(batches, model):
    """Its loss is that of a head on logits, and a penalty on weights of the model."""
    tokens = next(batches)
    stage = unwrapped(model)
    output = model(tokens, torch.arange(SEQUENCE).expand(2, -1), None)
    if not stage.post_process:
        return output, None
    scores, _ = stage.score(output)

    def loss_func(logits):
        loss = (scores - 1).square().mean() + logits.logsumexp(-1).mean() + stage.output_layer.weight.square().sum()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_func


def two_steps(layout, schedule):
    """Reports and gradients of two steps; in the first DDP learns what to wait for."""
    chunks = build(ModelWithHead(), layout)
    step = partial(
        schedule,
        forward_step_func=forward_step,
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        pg_collection=groups_of(layout),
    )
    found = []
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reports = step(data_iterator=[micro_batches() for _ in chunks])
        found.append((reports, {name: parameter.main_grad.clone() for name, parameter in named(chunks)}))
    return found


SETTINGS = {
    "replicas that reduce meanwhile": (Layout(overlap=True), {}),
    "split backwards": (Layout(pipeline=2), {"pipeline_schedule": "zb-h1"}),
    "a V": (Layout(pipeline=2, chunks=2, style="v"), {"pipeline_schedule": "auto", "pipeline_placement": "v"}),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_head_of_the_program_trains(name):
    layout, options = SETTINGS[name]
    use_ranks(Layout())
    with patched(each_replica_alone()):
        expected = two_steps(Layout(), forward_backward_no_pipelining)
    use_ranks(layout)
    megatron.seq1f1b.install(sequence_splits=3, **options)
    try:
        found = two_steps(layout, get_forward_backward_func())
    finally:
        megatron.seq1f1b.uninstall()
    for (reports, gradients), (own_reports, own_gradients) in zip(found, expected, strict=True):
        assert len(reports) == (MICROBATCHES if has_loss(layout) else 0)
        torch.testing.assert_close(reports, own_reports[: len(reports)], rtol=1e-10, atol=0)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, own_gradients[parameter], rtol=1e-9, atol=1e-12)
        assert not has_loss(layout) or gradients["score.weight"].abs().max() > 1e-3
