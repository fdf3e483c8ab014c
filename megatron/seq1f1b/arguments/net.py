"""The net under a program: an exception that ends it is one sentence on rank 0, and ends all ranks.

The sentence has the current operation, the words of the exception, and the file with its traceback, unless we found the
mistake. After the first step, the rank that failed first prints its traceback instead; all others print nothing. An
error that only says that another rank has ended or hangs is a sentence then, too.
"""

import atexit
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, TextIO

from ..process.causes import has_lost_a_peer, hidden_package, name_file, plain, way_out
from ..process.ranks import Peers, is_rank_0, rank
from ..schedule import ScheduleError
from .config import refuse_unsupported

# What some functions do, with values of their `args`.
_ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "validate_args": "checking the flags",
        "build_tokenizer": "loading the tokenizer of --tokenizer-type {tokenizer_type}",
        "_initialize_distributed": "connecting the ranks",
        "setup_model_and_optimizer": "building the model",
        "load_checkpoint": "loading the checkpoint in {load}",
        "build_train_valid_test_data_loaders": "reading the data",
        "train_step": "running a step",
        "evaluate": "evaluating",
        "save_checkpoint": "saving a checkpoint to {save}",
    }
)
_LITTLE = 2**20  # bytes
_LONGEST = 400  # characters of an exception's words: some hold whole state dictionaries
_VALUES = (bool, int, float, str, list, tuple, Enum, type(None))
_OF_TRAINING = ("megatron", "tokenizers", "torch", "tqdm")  # packages of the extra `train`
_SCRIPTS = ("__main__", "pretrain_gpt", "pretrain_hybrid")


class Net:
    """Ends the ranks of a job together: `caught` replaces `sys.excepthook`, `connect` joins the other ranks."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._printing = threading.Lock()

    def connect(self) -> None:
        """Join the other ranks that the environment names; call it as early as possible."""
        if any("multiprocessing" in word for word in sys.orig_argv):  # a worker, which imports the script of its rank
            return
        text = os.environ.get("WORLD_SIZE", "1")
        size = int(text) if text.isdecimal() else 1
        if rank() >= size:  # torch would wait for the missing ranks
            raise ValueError(f"RANK={rank()} in the environment must be below WORLD_SIZE={size}")
        if size > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            self._peers = Peers(self._end_with)
            atexit.register(self._peers.leave)

    def parsed(self, args: Namespace) -> Namespace:
        """The parsed `args`; raises ValueError if they differ from those of rank 0, or are unsupported."""
        if hasattr(args, "pipeline_schedule"):  # a script may parse its arguments without our flags
            refuse_unsupported(args, vars(args))
        if self._peers is not None:
            facts = _facts(args)
            timeout = timedelta(minutes=args.distributed_timeout_minutes)
            usual = json.loads(self._peers.share(json.dumps(facts), timeout))
            for name, here in facts.items():
                if usual.get(name) != here:
                    raise ValueError(
                        f"the ranks disagree: {name} is {here} on rank {rank()}, but {usual.get(name)} on rank 0; "
                        "start all ranks with the same flags and environment"
                    )
        return args

    def caught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replaces `sys.excepthook`: ends this rank, and with it all others."""
        name_file(error)
        needs_trace = not (isinstance(error, KeyboardInterrupt) or is_mistake(error) or has_lost_a_peer(error))
        is_late = _first_step_is_over() and needs_trace
        own = {
            "rank": rank(),
            "host": socket.gethostname(),
            "sentence": sentence_of(error),
            "traceback": None if is_mistake(error) else "".join(traceback.format_exception(error)),
            "is_late": is_late,
        }
        sys.unraisablehook = lambda unraisable: None  # half-built objects fail once more when they are deleted
        first = json.loads(self._peers.report(json.dumps(own))) if self._peers else own
        if first == own and is_late:
            sys.__excepthook__(kind, error, trace)
        elif is_rank_0():
            self._print(first if first["sentence"] != own["sentence"] else own)
        waits = first == own and not is_late and not is_rank_0()
        if (self._peers is None or not self._peers.leave(waits)) and waits:
            self._print(own)  # rank 0 has not printed
        if not first["is_late"] and not isinstance(
            error, KeyboardInterrupt
        ):  # for which Python itself ends by the signal
            sys.exit(2)

    def _end_with(self, report: str) -> None:
        """End this process at once: its main thread may wait for ever for the rank that failed."""
        first = json.loads(report)
        if is_rank_0():
            self._print(first)
        if self._peers is not None:
            self._peers.leave()
        os._exit(1 if first["is_late"] else 2)

    def _print(self, failure: Mapping[str, Any]) -> None:
        if failure["is_late"] or not self._printing.acquire(blocking=False):
            return
        where = "" if failure["rank"] == rank() == 0 else f" (rank {failure['rank']} on {failure['host']})"
        # torch.distributed's own hook wraps this one and holds its output back until it returns.
        sentence, line_end, picture = failure["sentence"].partition("\n")
        say(sentence + where + line_end + picture, failure["traceback"], sys.__stderr__)


def _facts(args: Namespace) -> dict[str, str]:
    """The values that must be equal on all ranks; folders and the numbers of ranks may differ."""
    facts = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in vars(args).items()
        if name not in ("rank", "local_rank") and isinstance(value, _VALUES) and os.sep not in str(value)
    }
    return facts | {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")}


def say(sentence: str, trace: str | None = None, stream: TextIO | None = None) -> None:
    """Print one sentence, given without its full stop, and the file into which `trace` is written. Further lines of it
    show the place that it speaks of."""
    sentence, _, picture = sentence.strip().partition("\n")
    ending = "" if trace is None else f"; the traceback is in {_written(trace)}"
    sentence = sentence.rstrip(".:") + ending
    lines = [f"error: {sentence}{'' if sentence.endswith('?') else '.'}", *picture.splitlines()]
    with suppress(OSError):  # what it prints to may be full
        sys.stdout.flush()  # else its output would come last
    print("\n".join(lines), file=stream or sys.stderr, flush=True)


def _written(trace: str) -> str:
    """The file with a traceback; a full disk must not hide the sentence."""
    new = partial(tempfile.NamedTemporaryFile, "w", prefix="seq1f1b-traceback-", suffix=".txt", delete=False)
    for folder in (os.getcwd, tempfile.gettempdir):
        with suppress(OSError), new(dir=folder()) as file:
            file.write(trace)
            return str(file.name)
    return "no file, since none can be written"


def is_mistake(error: BaseException) -> bool:
    """Whether this package or the script itself raised the error, so that its words are the sentence."""
    frames = _frames(error)
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    is_ours = module in _SCRIPTS or module.startswith("megatron.seq1f1b.")
    return isinstance(error, KeyboardInterrupt) or is_ours and isinstance(error, (ValueError, ImportError))


def sentence_of(error: BaseException) -> str:
    """The current operation and the words of the error, without a full stop."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if (sentence := hidden_package(error)) is not None:
        return sentence
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        what = "'.[train]' in the repository of this package" if package in _OF_TRAINING else package
        return f"the package {error.name} is missing; pip install {what} brings it"
    words, root = _words(error), error
    if is_mistake(error):
        return words
    while root.__cause__ is not None:
        root = root.__cause__
    if root is not error and _words(root) not in words:
        words = f"{words} ({_words(root)})"
    for frame in reversed(_frames(error)):
        if action := _ACTIONS.get(frame.f_code.co_name):
            values = defaultdict(str, getattr(frame.f_locals.get("args"), "__dict__", {}))
            return f"{action.format_map(values)} failed: {words}"
    return words


def _words(error: BaseException) -> str:
    name_file(error)
    if isinstance(error, OSError) and error.strerror:
        of_file = error.filename and f"{error.filename}: {error.strerror}{way_out(error)}"
        return of_file or f"{error.strerror}{_full_disks()}"
    if isinstance(error, ScheduleError):  # shows the ranks below each other
        return str(error)
    if isinstance(error, StopIteration):
        return "a data iterator ended early; give more data, or run fewer steps (--train-iters, --eval-iters)"
    text = plain(str(error))
    if "Traceback (most recent call last)" in text:  # of another process; its last line has the words
        text = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")][-1]
        text = re.sub(r"^[\w.]+\.(\w+: )", r"\1", text)
    text = " ".join(text.split())
    if isinstance(error, AssertionError) and not text:
        text = f"{_failed_statement(error)} does not hold"
    if isinstance(error, ZeroDivisionError):
        text = f"{text} in {_failed_statement(error)}"
    if " " not in text:  # such as that of a KeyError
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _full_disks() -> str:
    """Of the folders that programs write to unasked."""
    with suppress(OSError):
        folders = dict.fromkeys((os.getcwd(), tempfile.gettempdir()))
        full = [folder for folder in folders if shutil.disk_usage(folder).free < _LITTLE]
        return f"; the disk of {' and of '.join(full)} is full" if full else ""
    return ""


def _failed_statement(error: BaseException) -> str:
    """The first line of the statement that failed, and the values of the flags in it."""
    if error.__traceback__ is None:
        return "a check"
    source = traceback.extract_tb(error.__traceback__)[-1].line or "a check"
    args = _frames(error)[-1].f_locals.get("args")
    names = dict.fromkeys(name for name in re.findall(r"\bargs\.(\w+)", source) if hasattr(args, name))
    values = ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names)
    return source.replace("args.", "") + (f" ({values})" if values else "")


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _first_step_is_over() -> bool:
    """Whether Megatron's training loop, if there is one, has finished a step."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return args is not None and getattr(args, "curr_iteration", 0) > getattr(args, "iteration", 0)
