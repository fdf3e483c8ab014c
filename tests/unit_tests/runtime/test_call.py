"""A program's forward step, suspended at its call of the model."""

import contextvars
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.model_calls.call import Call
from megatron.seq1f1b.runtime.model_calls.call_arguments import Arguments
from megatron.seq1f1b.runtime.model_calls.calls import Calls
from megatron.seq1f1b.runtime.model_calls.interception import model_of
from megatron.seq1f1b.runtime.program_contract import ProgramContract
from support.linear_stages import Stage, endless, executor, run


def started(program, model=None):
    """A call of `program(model)`, whose calls of its model are intercepted."""
    model = model or Stage()
    step = SimpleNamespace(
        chunks=[model],
        iterators=[None],
        forward_step_func=lambda _, model: program(model),
        placement=SimpleNamespace(stage_of=lambda rank, chunk: 0),
        rank=0,
        config=SimpleNamespace(),
        groups=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        sequence_parallel=None,
        length_of=lambda microbatch: 8,
        autocast=nullcontext,
        num_microbatches=1,
        forward_only=False,
    )
    return Calls(step, ProgramContract())


def test_a_call_waits_and_returns_what_it_is_given():
    def program(model):
        return model("tokens", mask=2) + ["end"], None

    with started(program) as calls:
        arguments = calls.at(0, 0).arguments
        assert (arguments.positional, arguments.named, arguments.names) == (("tokens",), {"mask": 2}, ("tokens",))
        assert calls.finish(0, 0, ["output"]) == (["output", "end"], None)


def test_calls_of_another_model_run():
    """Of a teacher, for instance; and nothing is intercepted after the step."""
    teacher, model, ones = Stage(seed=1), Stage(), torch.ones(2, 4)

    def program(model):
        return teacher(ones), model(ones)

    with started(program, model) as calls:
        calls.at(0, 0)
        of_teacher, output = calls.finish(0, 0, "of the model")
    assert output == "of the model" and torch.equal(of_teacher, teacher(ones))
    assert "forward" not in vars(model) and torch.is_tensor(model(ones))


@pytest.mark.parametrize(
    "program, words",
    [
        (lambda model: (None, None), "of micro-batch 0 returned without a call of its model"),
        (lambda model: (model(1), model(2)), "calls its model twice"),
    ],
    ids=["none", "two"],
)
def test_another_number_of_calls_than_one_is_refused(program, words):
    with pytest.raises(ValueError, match=words), started(program) as calls:
        calls.at(0, 0)
        calls.finish(0, 0, torch.ones(1))


def test_inference_mode_is_refused_and_left():
    def program(model):
        with torch.inference_mode():
            return model(1), None

    with pytest.raises(ValueError, match="under torch.inference_mode, .* use torch.no_grad"), started(program) as calls:
        calls.at(0, 0)
    assert not torch.is_inference_mode_enabled()


def test_a_model_that_is_another_stage_for_a_call_is_refused():
    def program(model):
        model.post_process = False  # to get hidden states
        try:
            return model("tokens"), None
        finally:
            model.post_process = True

    calls = started(program)
    calls.models[0].post_process = True
    with calls, pytest.raises(ValueError, match="changes post_process of its model"):
        calls.at(0, 0)


def test_a_training_step_without_gradients_is_refused():
    def program(model):
        with torch.no_grad():
            return model(1), None

    with pytest.raises(ValueError, match="without gradients in a training step"), started(program) as calls:
        assert calls.at(0, 0).reference is not None
        calls.go_on(0, 0, torch.ones(1))
    assert torch.is_grad_enabled()


def test_a_stage_of_another_model_is_a_reference():
    model, reference = Stage(), Stage(seed=1)
    for stage in (model, reference):
        stage.pre_process, stage.post_process = False, True

    def program(model, gradients=False):
        with torch.set_grad_enabled(gradients):
            of_reference = reference(1)
        return of_reference, model(2)

    with started(program, model) as calls:
        call = calls.at(0, 0)
        assert call.reference is reference and call.arguments.positional == (1,)
        calls.go_on(0, 0, "of the reference")
        assert call.reference is None and call.arguments.positional == (2,)
        assert calls.finish(0, 0, "of the model") == ("of the reference", "of the model")
    assert "forward" in vars(Stage) and Stage.forward.__name__ == "forward"
    words = "calls another model than the schedule was given, and with gradients"
    with pytest.raises(ValueError, match=words), started(partial(program, gradients=True), model) as calls:
        calls.at(0, 0)


def test_a_reference_is_not_trained_in_an_evaluation():
    """Though its weights could be: the evaluation is without gradients, as Megatron's training loop runs it."""
    model, reference = Stage(), Stage(seed=1)
    for stage in (model, reference):
        stage.pre_process, stage.post_process = False, True
    calls = started(lambda model: (reference(1), model(2)), model)
    calls._step.forward_only = True
    with torch.no_grad(), calls:
        assert calls.at(0, 0).reference is reference


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, backend="eager"), lambda model: model])
def test_a_model_that_was_compiled_as_a_whole_is_refused(compiled):
    model = Stage()
    if compiled(model) is model:
        model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled as a whole by torch.compile, .* compile its layers instead"):
        model_of(compiled(model))


def test_gradients_and_autocast_are_those_of_whoever_runs():
    seen = []

    def state():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def program(model):
        with torch.autocast("cpu", dtype=torch.float16):
            model(1)
            seen.append(state())
        seen.append(state())
        return None, None

    outside = state()
    with started(program) as calls:
        call = calls.at(0, 0)
        assert state() == outside
        assert call.run_model(state, Arguments((), {}, ())) == (True, True, torch.float16)
        assert state() == outside
        calls.finish(0, 0, None)
    assert seen == [(True, True, torch.float16), outside] and state() == outside


class Streams:
    """Stands in for the streams of a GPU."""

    def __init__(self) -> None:
        self.now, self.waits = "of the step", []

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.waits.append((name, other.name)))


def test_streams_wait_for_one_another(monkeypatch):
    streams = Streams()
    current = {"stream": (own := streams.stream("of the step"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current["stream"])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.update(stream=stream))

    def program(model):
        torch.cuda.set_stream(streams.stream("of the program"))
        model(1)
        assert torch.cuda.current_stream().name == "of the program"
        torch.cuda.set_stream(own)
        return None, None

    with started(program) as calls:
        calls.at(0, 0)
        assert current["stream"] is own and streams.waits == [("of the step", "of the program")]
        calls.finish(0, 0, None)
    assert ("of the program", "of the step") in streams.waits and current["stream"] is own


def test_context_variables_reach_the_program():
    variable = contextvars.ContextVar("variable")
    variable.set("value")
    with started(lambda model: (model(1), variable.get())) as calls:
        calls.at(0, 0)
        assert calls.finish(0, 0, 2) == (2, "value")


def test_a_failure_ends_suspended_programs():
    """Their `finally` blocks run, and none of them hides the failure."""
    ended = []

    def program(model):
        try:
            return model(1), None
        finally:
            ended.append(True)
            raise OSError("in the block")

    with pytest.raises(KeyError), started(program) as calls:
        call = calls.at(0, 0)
        raise KeyError
    assert ended == [True] and call.dead


def test_a_program_that_ends_the_process_at_its_end_is_undone():
    """All programs end, and calls of the model are intercepted no longer."""
    ended = []

    def program(model):
        try:
            return model(1), None
        finally:
            ended.append(True)
            raise SystemExit(3)

    with pytest.raises(SystemExit), started(program) as calls:
        model = calls.models[0]
        assert "forward" in vars(model)
        suspended = [calls.at(0, microbatch) for microbatch in (0, 1)]
        raise KeyError
    assert ended == [True, True] and all(call.dead for call in suspended)
    assert "forward" not in vars(model)


def failing(data_iterator, model):
    output = model(next(data_iterator))
    raise LookupError(f"no labels for {len(output)}")


def test_a_failure_of_the_program_has_its_traceback(alone):
    runs, model = executor(k=2), Stage()
    with pytest.raises(LookupError, match="no labels") as failure:
        run(runs, model, step=failing)
    assert "failing" in [entry.name for entry in failure.traceback]
    assert "failed at 0F0.1, among" in "\n".join(failure.value.__notes__)
    run(runs, model)  # nothing of it is left


def test_micro_batches_are_read_in_order():
    read = []

    def program(number, model):
        return model(number), None

    calls = started(lambda model: program(read.append(len(read)), model))
    calls._step.num_microbatches = 3
    with calls:
        calls.at(0, 2)
        assert read == [0, 1, 2]
        calls.at(0, 1)
    assert read == [0, 1, 2]


@pytest.mark.parametrize("k", [2, 4])
def test_a_program_may_average_as_it_likes(alone, k):
    """A mean over tokens that is no sum over segments; the gradient is that of whole sequences."""

    def step(data_iterator, model):
        output = model(next(data_iterator))

        def loss_func(output):
            loss = output[:, 1:].logsumexp(1).square().mean()
            return loss, {"loss": loss.detach(), "shape": list(output.shape)}

        return output, loss_func

    found = {}
    for segments in (1, k):
        model = Stage()
        reports = run(executor(k=segments), model, step=step, data_iterator=endless())
        found[segments] = [p.grad for p in model.parameters()], [float(each["loss"]) for each in reports]
        assert all(each["shape"] == [2, 8, 4] for each in reports)
    assert all(map(partial(torch.allclose, rtol=1e-5), found[1][0], found[k][0]))
    assert found[1][1] == pytest.approx(found[k][1])


def test_a_suspended_call_is_a_greenlet_of_its_own():
    assert not Call(lambda: None, Stage(), (), "micro-batch 0")
