"""Who is told of the actions of a step."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.recording.spans import around_actions


@pytest.fixture
def lens(monkeypatch):
    """What stands for nemo-lens: the groups that are on, and the spans that were made."""
    lens = SimpleNamespace(groups=set(), spans=[])

    @contextmanager
    def managed_span(group, name):
        lens.spans.append((group, name))
        yield

    state = SimpleNamespace(is_span_group_enabled=lambda group: group in lens.groups)
    monkeypatch.setitem(sys.modules, "nemo.lens.helpers", SimpleNamespace(managed_span=managed_span))
    monkeypatch.setitem(sys.modules, "nemo.lens.state", state)
    return lens


def test_nobody_is_told_without_a_listener():
    assert around_actions() is None


def test_an_action_is_a_span_if_its_group_is_on(lens):
    assert around_actions() is None
    lens.groups.add("microbatch")
    with around_actions()("0F1.2"):
        pass
    assert lens.spans == [("microbatch", "0F1.2")]


def test_an_action_is_a_range_in_the_profiler():
    with torch.profiler.profile() as profile, around_actions()("0F1.2"):
        pass
    assert "0F1.2" in {event.key for event in profile.key_averages()}
