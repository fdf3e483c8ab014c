"""How a program without Megatron's arguments comes to an executor."""

from types import SimpleNamespace

import pytest

from megatron.seq1f1b.runtime import from_config


def test_every_model_of_a_program_is_checked(monkeypatch):
    """What is unsupported may be in the second."""
    models = [SimpleNamespace(config=SimpleNamespace(name=name)) for name in ("first", "second", "unsupported")]

    def configure(run):
        if run == "unsupported":
            raise ValueError("drop it")
        return run

    monkeypatch.setattr(from_config, "run_of_program", lambda model, *_: model.config.name)
    monkeypatch.setattr(from_config, "_executor", lambda config, **_: lambda **step: config)
    monkeypatch.setattr(from_config, "traced", lambda function, *_: function)
    program = from_config.ProgramExecutor(configure)
    first, second, unsupported = models
    assert [program(model=model, num_microbatches=1) for model in (first, second, [first])] == ["first"] * 3
    for _ in range(2):
        with pytest.raises(ValueError, match="drop it"):
            program(model=unsupported, num_microbatches=1)
