"""A step leaves nothing behind, takes handlers for kinds of actions, and shows its actions to a profiler."""

import gc
import weakref

import pytest
import torch

from megatron.seq1f1b.runtime import Tracer
from megatron.seq1f1b.runtime.interpreter import Interpreter
from megatron.seq1f1b.schedule import Kind
from support.linear_stages import Stage, endless, executor, run, summed


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_no_object_of_a_step_is_in_a_reference_cycle(alone, tmp_path, schedule, is_traced):
    """A cycle would keep the data iterator, and with it the data loader's workers, until a collection."""
    model, runs = Stage(), executor(schedule, tracer=Tracer(tmp_path, {1}, lambda: 1) if is_traced else None)
    run(runs, model)  # caches of PyTorch and Megatron
    outputs = []

    def step(data_iterator, model):
        output, loss_func = summed(data_iterator, model)
        outputs.append(weakref.ref(output))
        return output, loss_func

    batches = endless()
    gone = weakref.ref(batches)
    gc.collect()
    gc.disable()
    try:
        run(runs, model, step=step, data_iterator=batches)
        del batches
        assert gone() is None
        assert outputs and all(output() is None for output in outputs)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [kept for kept in gc.garbage if isinstance(kept, torch.Tensor)]
        assert not [kept for kept in gc.garbage if type(kept).__module__.startswith("megatron.seq1f1b")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_the_context_forgets_that_backwards_were_split(alone):
    """Else references of the next step, which run before its own model, would keep keys and values, not latents."""
    runs = executor("zb-h1")
    run(runs, Stage())
    assert not runs.context.splits_backwards


def test_every_kind_of_action_has_a_handler():
    assert Interpreter.HANDLERS.keys() == {*Kind}


def test_kinds_of_actions_can_be_given_handlers(alone, monkeypatch):
    reduced = []
    monkeypatch.setitem(Interpreter.HANDLERS, Kind.REDUCE, lambda _, action: reduced.append(str(action)))
    run(executor(), Stage())
    assert reduced == ["0REDUCE"]


def test_every_action_is_a_range_of_the_profiler(alone):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(executor("zb-h1"), Stage(), num_microbatches=1)
    names = {event.name for event in profile.events()}
    assert {"0F0.0", "0F0.1", "0I0.1", "0I0.0", "0W0.0", "0W0.1"} <= names
