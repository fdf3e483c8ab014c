"""The net under a program: an exception that nobody catches becomes one sentence on rank 0, and ends all ranks.

The sentence says what was being done, then has the message of the exception and the file with its traceback; a mistake
that we found ourselves needs no traceback. After the first step the rank that failed first prints its traceback
instead, and all others print nothing; only an error that says no more than that another rank has ended or hangs is
still a sentence.
"""

import atexit
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from .causes import add_file_name, has_lost_a_peer
from .peers import Peers
from .ranks import is_rank_0, rank
from .scarce_memory import lacks_memory, let_go
from .sentences import is_mistake, say, sentence_of

_START_OF_OTHERS = 5.0  # seconds by which ranks start one after another
_TRIES = 100  # to tell the others of a lack of memory
_PAUSE = 0.1  # seconds between two of these
_PATIENCE = 120  # seconds that a failed process may take to say why, and to end


class Net:
    """Ends the ranks of a job together: `caught` replaces `sys.excepthook`, `connect` joins the other ranks."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._flags: dict[str, str] = {}
        self._printing = threading.Lock()
        # What a rank says that has not the memory to say more.
        host = socket.gethostname()
        self._last_words = f"error: the memory of this host is full (rank {rank()} on {host}).\n".encode()
        self._last_report = json.dumps(
            {
                "rank": rank(),
                "host": host,
                "sentence": "the memory of this host is full",
                "traceback": None,
                "is_late": False,
            }
        )

    def connect(self) -> None:
        """Join the other ranks that the environment names; call it as early as possible."""
        is_worker = any("multiprocessing" in word for word in sys.orig_argv)  # which imports the script of its rank
        if is_worker:
            return
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            self._peers = Peers(self._end_with)
            atexit.register(self._peers.leave)

    def learn_flags(self, parser: ArgumentParser) -> None:
        """Take the spellings of the flags, so that sentences name those that an error speaks of."""
        # A flag that turns something off has the name of what it turns off.
        turning_on = [action for action in parser._actions if action.option_strings and action.const is not False]
        self._flags = {action.dest: action.option_strings[0] for action in turning_on}

    def require_equal(self, facts: Mapping[str, str], timeout: timedelta) -> None:
        """Raise ValueError if these `facts`, values by the names of flags, differ from those of rank 0."""
        if self._peers is None:
            return
        of_rank_0 = json.loads(self._peers.share(json.dumps(facts), timeout))
        for name, here in facts.items():
            if of_rank_0.get(name) != here:
                raise ValueError(
                    f"the ranks disagree: {name} is {here} on rank {rank()}, but {of_rank_0.get(name)} on rank 0; "
                    "start all ranks with the same flags and environment"
                )

    def caught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replaces `sys.excepthook`: ends this rank, and with it all others. Rank 0 prints the sentence of the rank
        that failed first, or that rank itself if rank 0 does not."""
        try:
            _end_soon()
            self._end(kind, error, trace)
        except MemoryError:
            self._give_up()

    def _give_up(self) -> NoReturn:
        """The last resort of a rank without memory: end the ranks by words that are there already."""
        rank_0_has_printed = False
        tries = 0
        try:
            while tries < _TRIES:
                tries += 1
                try:
                    if tries > 1:
                        time.sleep(_PAUSE)  # other threads may free some memory
                    _end_soon()  # before what may wait: a lack of memory can leave a lock of Python's locked
                    if self._peers is not None:
                        self._peers.report(self._last_report)
                        rank_0_has_printed = self._peers.leave(wait=not is_rank_0())
                    break
                except MemoryError:
                    continue
        finally:
            try:
                if not rank_0_has_printed:
                    os.write(2, self._last_words)
            finally:
                os._exit(2)

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = self._described(error)
        sys.unraisablehook = lambda unraisable: None  # half-built objects fail once more when they are deleted
        first = own
        if self._peers is None:
            _let_others_speak()
        else:
            first = json.loads(self._peers.report(json.dumps(own)))
        is_first = first == own
        if is_first and own["is_late"]:
            sys.__excepthook__(kind, error, trace)
        elif is_rank_0():
            # The same mistake on all ranks is printed as that of rank 0, without the name of another rank.
            self._print(own if first["sentence"] == own["sentence"] else first)
        if is_first and not own["is_late"] and not is_rank_0():
            rank_0_has_printed = self._peers is not None and self._peers.leave(wait=True)
            if not rank_0_has_printed:
                self._print(own)
        elif self._peers is not None:
            self._peers.leave()
        is_interrupted = isinstance(error, KeyboardInterrupt)  # Python itself then ends by the signal
        if not first["is_late"] and not is_interrupted:
            sys.exit(2)

    def _end_with(self, report: str) -> None:
        """End this process at once: its main thread may wait for ever for the rank that failed."""
        code = 2
        try:
            first = json.loads(report)
            code = 1 if first["is_late"] else 2
            if is_rank_0():
                self._print(first)
            if self._peers is not None:
                self._peers.leave()
        finally:
            os._exit(code)

    def _described(self, error: BaseException) -> dict[str, Any]:
        """The failure of this rank. Raises MemoryError if even then there is none when the step's tensors are freed."""
        try:
            failure = _failure_of(error, self._flags)
        except MemoryError:
            let_go(error)
            return _failure_of(error, self._flags)
        if lacks_memory(error):  # what follows needs some
            let_go(error)
        return failure

    def _print(self, failure: Mapping[str, Any]) -> None:
        if failure["is_late"] or not self._printing.acquire(blocking=False):
            return
        where = f" (rank {failure['rank']} on {failure['host']})"
        if is_rank_0() and failure["rank"] == 0:
            where = ""  # rank 0 speaks of itself
        # torch.distributed's own hook wraps this one and holds its output back until it returns.
        sentence, line_end, picture = failure["sentence"].partition("\n")
        say(sentence + where + line_end + picture, failure["traceback"], sys.__stderr__)


def _failure_of(error: BaseException, flags: Mapping[str, str]) -> dict[str, Any]:
    """The failure of this rank, in the form in which ranks report it to one another. A failure after the first step
    `is_late`, unless one sentence says all of it."""
    add_file_name(error)
    is_ours = is_mistake(error)
    is_said_by_a_sentence = is_ours or isinstance(error, KeyboardInterrupt) or has_lost_a_peer(error)
    return {
        "rank": rank(),
        "host": socket.gethostname(),
        "sentence": sentence_of(error, flags),
        "traceback": None if is_ours else "".join(traceback.format_exception(error)),
        "is_late": _first_step_is_over() and not is_said_by_a_sentence,
    }


def _let_others_speak() -> None:
    """Wait before the words of a rank that has joined no others: for rank 0, and for the first rank of this host. Of a
    mistake that all have made, such as a wrong MASTER_PORT, they have said the same by then, and what started the ranks
    has ended this one."""
    if rank() > 0:
        time.sleep(_START_OF_OTHERS)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_START_OF_OTHERS)


def _end_soon() -> None:
    """Let the system end this process, should it not end by itself: at its end a library may wait for a thread that
    waits for another rank. What is garbage by now stays where it is: CPython 3.12.1 crashes where it collects a buffer
    of a file in memory (github.com/python/cpython/issues/111049), which a checkpoint has for each tensor."""
    gc.freeze()
    if not sys.flags.interactive and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE)


def _first_step_is_over() -> bool:
    """Whether Megatron's training loop, if there is one, has finished a step."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return args is not None and getattr(args, "curr_iteration", 0) > getattr(args, "iteration", 0)
