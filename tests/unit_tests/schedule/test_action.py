import pytest

from megatron.seq1f1b.schedule import Action, Kind, parse_action


@pytest.mark.parametrize("kind", list(Kind))
def test_text_form_and_parser_are_inverses(kind):
    whole_chunk = kind in (Kind.GATHER, Kind.REDUCE)
    for stage in (0, 7, 127):
        action = Action(kind, stage) if whole_chunk else Action(kind, stage, 511, 15)
        assert parse_action(str(action)) == action
        assert isinstance(parse_action(str(action)).kind, Kind)


def test_text_form():
    assert str(Action(Kind.F, 2, 3, 1)) == "2F3.1"
    assert str(Action(Kind.RECV_B, 2, 3, 1)) == "2RECV_B3.1"
    assert str(Action(Kind.REDUCE, 2)) == "2REDUCE"
    assert parse_action("2F3") == Action(Kind.F, 2, 3, 0)


@pytest.mark.parametrize("text", ["", "F3.1", "2X3.1", "2F", "2REDUCE3.1", "2F3.", "2F3.1x", "-1F0.0"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        parse_action(text)
