"""How a program without Megatron's arguments comes to an executor."""

from types import SimpleNamespace

import pytest

from megatron.seq1f1b.launch import executors


def test_every_model_of_a_program_is_checked(monkeypatch):
    """What is unsupported may be in the second."""
    models = [SimpleNamespace(config=SimpleNamespace(name=name)) for name in ("first", "second", "unsupported")]

    def configure(run):
        if run == "unsupported":
            raise ValueError("drop it")
        return run

    monkeypatch.setattr(executors, "run_of_program", lambda model, *_: model.config.name)
    monkeypatch.setattr(executors, "_executor", lambda config, tracer, **_: lambda **step: config)
    monkeypatch.setattr(executors, "tracer_of", lambda *_: None)
    program = executors.ProgramExecutor(configure)
    first, second, unsupported = models
    step = {"num_microbatches": 1, "pg_collection": SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))}
    assert [program(model=model, **step) for model in (first, second, [first])] == ["first"] * 3
    for _ in range(2):
        with pytest.raises(ValueError, match="drop it"):
            program(model=unsupported, **step)
