"""Tables of patches: bound in order, on modules or on objects, and undone."""

import sys
import types

import pytest

from megatron.seq1f1b.process.patches import Patch, patched, patched_on


class Base:
    def greet(self) -> str:
        return "base"


class Kind(Base):
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def module(monkeypatch):
    """Importable as `patched_module`."""
    made = types.ModuleType("patched_module")
    made.Kind, made.answer = Kind, lambda: 41
    monkeypatch.setitem(sys.modules, "patched_module", made)
    return made


def louder(kind, greet):
    return lambda: f"{kind.name}: {greet().upper()}"


def test_names_are_bound_inside_and_as_before_outside(module):
    answer = module.answer
    table = (
        Patch("patched_module.answer", lambda old: lambda: old() + 1, "one is missing", wraps=True),
        Patch("patched_module.answer", lambda old: lambda: old() * 10, "and later ones see it", wraps=True),
        Patch("patched_module.Kind.greet", lambda self: self.name, "it has a name"),
    )
    with patched(table):
        assert module.answer() == 420 and Kind("kind").greet() == "kind"
    assert module.answer is answer
    assert "greet" not in vars(Kind) and Kind("kind").greet() == "base"  # inherited again, not copied


def test_on_objects_only_those_of_the_class_are_touched(module):
    first, second, other = Kind("first"), Kind("second"), Base()
    second.greet = lambda: "its own"
    table = (Patch("patched_module.Kind.greet", louder, "quiet", wraps=True),)
    undo = patched_on([first, second, other], table)
    assert [each.greet() for each in (first, second, other)] == ["first: BASE", "second: ITS OWN", "base"]
    assert Kind("third").greet() == "base"
    undo.close()
    assert [each.greet() for each in (first, second, other)] == ["base", "its own", "base"]
    assert "greet" not in vars(first)


def test_a_submodule_can_be_replaced(module):
    torch = pytest.importorskip("torch")
    module.Linear = torch.nn.Sequential
    model = torch.nn.Sequential()
    model.inner = inner = torch.nn.Linear(1, 1)
    with patched_on([model], (Patch("patched_module.Linear.inner", torch.nn.ReLU(), "why"),)):
        assert isinstance(model.inner, torch.nn.ReLU) and [*model.parameters()] == []
    assert model.inner is inner and len([*model.parameters()]) == 2


def test_what_is_bound_before_a_failure_is_undone(module):
    answer = module.answer
    rows = (Patch("patched_module.answer", None, "why"), Patch("patched_module.gone", None, "why"))
    with pytest.raises(AttributeError, match="cannot patch patched_module.gone"):
        patched(rows)
    assert module.answer is answer
