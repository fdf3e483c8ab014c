"""Programs that call Megatron's pipeline function in ways of their own: for what is not a loss, with several models,
and more than once before a step of the optimizer. Reports and gradients are those of one stage with whole sequences, by
Megatron's own schedule; of replicas, those without our schedules.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from torch import Tensor

import megatron.seq1f1b
from functional_tests.equality.cases import Layout
from functional_tests.equality.comparison import each_replica_alone
from functional_tests.equality.layout import build, groups_of, has_loss, named, use_ranks
from functional_tests.equality.models import VOCABULARY, Model
from functional_tests.equality.step import gather_sharded_gradients
from functional_tests.programs.program import unwrapped
from megatron.seq1f1b.process.patches import patched
from support.on_ranks import on_ranks

LENGTHS = (24, 10, 17, 12)  # of the sequences of each micro-batch
FIXED = (24,) * len(LENGTHS)

LAYOUTS = {
    "pp2": Layout(pipeline=2),
    "pp2-chunks": Layout(pipeline=2, chunks=2),
    "dp2-overlap": Layout(overlap=True, distributed_optimizer=True),
}
OPTIONS = {
    "tokens": {"segment_tokens": 8},
    "splits-zb-h1": {"sequence_splits": 3, "pipeline_schedule": "zb-h1"},
    "whole": {"pipeline_schedule": "breadth-first"},
}

ACTOR = Model()
# Of other sizes than the actor, with the same stages.
CRITIC = Model(layers=8, heads=2).but(hidden_size=16, kv_channels=8, num_query_groups=2, ffn_hidden_size=24)


class Program:
    """A model in a layout, its micro-batches, and its calls of the pipeline function."""

    def __init__(self, schedule: Callable, layout: Layout, model: Model = ACTOR, lengths=LENGTHS) -> None:
        self.chunks = build(model, layout)
        self.config = self.chunks[0].config
        self.config.variable_seq_lengths = lengths is not FIXED
        self._lengths = lengths
        self._num_calls = 0
        self._call = partial(
            schedule,
            forward_step_func=forward_step,
            model=self.chunks,
            num_microbatches=len(lengths),
            seq_length=lengths[0],
            micro_batch_size=2,
            pg_collection=groups_of(layout),
        )

    def call(self, **given: bool) -> list:
        """The reports of a call, of new data."""
        self._num_calls += 1
        return self._call(data_iterator=[self._batches() for _ in self.chunks], **given)

    def evaluate(self, **given: bool) -> list:
        with torch.no_grad():
            return self.call(forward_only=True, **given)

    def step(self) -> list:
        """The reports and the gradients of one call."""
        self.zero()
        return [self.call(), self.gradients()]

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def gradients(self) -> dict[str, Tensor]:
        gather_sharded_gradients(self.chunks)
        return {name: parameter.main_grad.clone() for name, parameter in named(self.chunks)}

    def _batches(self) -> Iterator[Tensor]:
        """Another replica has others."""
        seed = 10 * self._num_calls + parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(seed)
        return iter([torch.randint(VOCABULARY, (2, length), generator=generator) for length in self._lengths])


def forward_step(batches: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    tokens = next(batches)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    labels = tokens.roll(-1, dims=1) if unwrapped(model).config.hidden_size != 16 else None
    output = model(tokens, torch.arange(length).expand(2, -1), mask, labels=labels)

    def loss_func(found: Tensor, non_loss_data: bool = False) -> object:
        if non_loss_data:
            return {"of tokens": found.detach().clone(), "length": length}
        of_tokens = found.flatten(2).square().mean(2) if labels is None else found
        loss = (of_tokens * torch.linspace(0, 1, length)).mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_func


def what_is_no_loss(schedule: Callable, layout: Layout) -> list:
    """Before and after a step."""
    program = Program(schedule, layout)
    before = program.evaluate(collect_non_loss_data=True)
    step = program.step()
    return [before, *step, program.evaluate(collect_non_loss_data=True)]


def two_models(schedule: Callable, layout: Layout) -> list:
    """In turn, as in PPO; micro-batches of the actor are of one length."""
    actor = Program(schedule, layout, lengths=FIXED)
    critic = Program(schedule, layout, CRITIC)
    inferred = [actor.evaluate(), critic.evaluate()]
    return [*inferred, *critic.step(), *actor.step(), *critic.step(), actor.evaluate(), *actor.step()]


def sums_of_two_calls(schedule: Callable, layout: Layout) -> list:
    """Twice; the first call of each sum ends no step, and leaves the gradients of replicas alone."""
    program = Program(schedule, layout)
    found: list = []
    for _ in range(2):
        program.zero()
        with ExitStack() as around:
            for chunk in program.chunks:
                around.enter_context(chunk.no_sync())
            finalize = program.config.finalize_model_grads_func
            program.config.finalize_model_grads_func = None
            found.append(program.call())
            program.config.finalize_model_grads_func = finalize
        found.append(program.call())
        found.append(program.gradients())
    return found


def expected_of(steps: Callable, layout: Layout) -> list:
    if layout.pipeline == 1:
        use_ranks(layout)
        return steps(pipeline_parallel.get_forward_backward_func(), layout)
    use_ranks(Layout())
    with patched(each_replica_alone()):
        return steps(forward_backward_no_pipelining, Layout())


def require_equal(found: list, expected: list, layout: Layout) -> None:
    """Of the reports, and of the gradients that this rank has."""
    assert len(found) == len(expected)
    for mine, whole in zip(found, expected, strict=True):
        if isinstance(mine, dict):
            whole = {name: whole[name] for name in mine}
        elif not has_loss(layout):
            whole = []
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [what_is_no_loss, two_models, sums_of_two_calls])
def test_a_program_steps_as_it_likes(steps, layout):
    expected = expected_of(steps, LAYOUTS[layout])
    use_ranks(LAYOUTS[layout])
    for options in OPTIONS.values():
        megatron.seq1f1b.install(**options)
        try:
            found = steps(pipeline_parallel.get_forward_backward_func(), LAYOUTS[layout])
        finally:
            megatron.seq1f1b.uninstall()
        require_equal(found, expected, LAYOUTS[layout])
