"""Who may run a step."""

import multiprocessing
import os
import threading

from megatron.seq1f1b.process.one_caller import OneCaller


def test_one_thread_runs_steps_at_a_time():
    caller, refusals = OneCaller(), []

    def step() -> None:
        try:
            with caller.entered():
                pass
        except ValueError as error:
            refusals.append(str(error))

    with caller.entered():
        other = threading.Thread(target=step)
        other.start()
        other.join()
    step()
    assert len(refusals) == 1 and refusals[0].endswith("let one thread run all steps, one after the other")


def test_a_fork_of_a_process_that_ran_steps_runs_none():
    def enter(caller: OneCaller, result) -> None:
        try:
            with caller.entered():
                result.put("entered")
        except ValueError as error:
            result.put(str(error))

    def in_a_fork(caller: OneCaller) -> str:
        context = multiprocessing.get_context("fork")
        result = context.SimpleQueue()
        child = context.Process(target=enter, args=(caller, result))
        child.start()
        child.join()
        return result.get()

    caller = OneCaller()
    assert in_a_fork(caller) == "entered"  # such as a rank of a program that starts its ranks itself
    with caller.entered():
        pass
    assert f"was forked from process {os.getpid()}, which has run steps" in in_a_fork(caller)
