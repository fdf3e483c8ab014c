import _thread
import time

import pytest

from megatron.seq1f1b.process import threads
from megatron.seq1f1b.process.threads import in_time, one_after_another, start_thread


@pytest.fixture
def without_memory(monkeypatch):
    """New threads have a stack, and no memory for their first lines."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, arguments: 1)
    monkeypatch.setattr(threads, "_PATIENCE", 0.1)


def test_a_thread_that_ends_at_its_start_is_not_waited_for(without_memory):
    """`threading.Thread.start` would wait for ever."""
    with pytest.raises(RuntimeError, match="^can't start new thread"):
        start_thread(lambda: None, patience=0.1)
    with pytest.raises(RuntimeError, match="^can't start new thread"):
        in_time(0.1, lambda: None)


def test_a_call_has_its_result_in_time_or_an_error():
    assert in_time(20, lambda: "result") == "result"
    with pytest.raises(KeyError, match="mine"):
        in_time(20, lambda: {}["mine"])
    with pytest.raises(RuntimeError, match="^no answer for 0.1 s$"):
        in_time(0.1, lambda: time.sleep(1))
    with pytest.raises(RuntimeError, match="^no answer from the store for 0.1 s$"):
        in_time(0.1, lambda: time.sleep(1), source="the store")


def test_calls_of_one_thread_run_in_order_also_after_an_error():
    submit = one_after_another()
    seen = []

    def fail() -> None:
        raise SystemExit("in a thread")

    first, failing, last = submit(lambda: seen.append(1)), submit(fail), submit(lambda: seen.append(2))
    last.result(20)
    assert seen == [1, 2] and first.done()
    with pytest.raises(SystemExit):
        failing.result(20)
