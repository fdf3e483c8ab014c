"""The causes behind errors of libraries: a rank that is gone, a package that another one hides, a full disk.

Tested in process/test_net.py.
"""

import errno
import io
import json
import math
import pickle
import re
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import distribution, packages_distributions
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

# What gloo and NCCL say of a rank that has ended.
_LOST_PEER = re.compile(
    r"(?:Connection closed by peer|Read error|Write error) \[(?P<host>[^\]]*)\]:\d+.*"
    r"|(?:NCCL communicator was aborted|ncclRemoteError|remote process exited).*",
    re.DOTALL,
)
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms for \w+ operation to complete\.?")

# Errors of a file system, which come without the name of the file if they end a write.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LostPeer(RuntimeError):
    """Another rank has ended or hangs; in words for the person who started the job."""


def has_lost_a_peer(error: BaseException) -> bool:
    """Whether the error says only that another rank has ended or hangs. Then its traceback explains nothing."""
    if isinstance(error, LostPeer):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(text) or _TIMED_OUT.search(text))


def in_plain_words(text: str) -> str:
    """The message of a library, in words for who started the job."""
    for pattern, words in _PLAIN_WORDS:
        text = pattern.sub(words, text)
    return text


def _on_lost_peers(match: re.Match[str]) -> str:
    place = f" on {match['host']}" if match["host"] else ""
    return (
        f"the connection to another rank{place} broke, so that rank has ended; its own last words, or those of "
        "what started it, say why"
    )


def _on_time(match: re.Match[str]) -> str:
    return (
        f"nothing moved for {int(match[1]) / 1000:g} s; another rank hangs, or needs a longer "
        "--distributed-timeout-minutes"
    )


def _on_memory(match: re.Match[str]) -> str:
    mib = int(match["bytes"]) / 2**20
    size = f"{mib / 2**10:,.1f} GiB" if mib >= 2**10 else f"{mib:,.1f} MiB"
    return (
        f"a tensor of {size} does not fit into the memory of this host; look at the sizes of the model and of a "
        "micro-batch"
    )


def _on_other_shapes(match: re.Match[str]) -> str:
    if ".dp_group_idx_" in match["key"]:  # flat buffers, whose sizes follow from those of the groups of ranks
        return (
            "--load has the state of the optimizer for other parallel sizes or another schedule; take those, or save "
            "it with --dist-ckpt-optim-fully-reshardable"
        )
    saved, asked = ([*map(int, re.findall(r"\d+", match[side]))] for side in ("saved", "asked"))
    return (
        f"{match['key']} has the shape {saved} in --load, and {asked} in this launch; give the flags of the model that "
        "was saved (--hidden-size, --num-layers, --swiglu, ...)"
    )


# What libraries say, and what it means; applied one after the other.
_PLAIN_WORDS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(
            r"(?:\[enforce fail [^\]]*\] err == 0\. )?DefaultCPUAllocator: can't allocate memory: you tried to "
            r"allocate (?P<bytes>\d+) bytes\. Error code 12 \(Cannot allocate memory\)"
        ),
        _on_memory,
    ),
    (
        re.compile(r"can't start new thread.*"),
        "no thread can be started, for want of memory or by the limit of ulimit -u; look at the sizes of the model and "
        "of a micro-batch",
    ),
    (
        re.compile(
            r"Global shape mismatch for loaded \((?P<saved>.*)\) and expected \((?P<asked>.*)\) tensor for key "
            r"(?P<key>.*)"
        ),
        _on_other_shapes,
    ),
    (
        re.compile(
            r"OptimizerParamScheduler: class input value (?P<asked>.*) and checkpoint ?value (?P<saved>.*) for "
            r"(?P<what>.*) do not match"
        ),
        r"--load has \g<saved> as \g<what>, and this launch \g<asked>; give the flags of the saved run "
        "(--train-iters, --global-batch-size, --lr-decay-iters, ...), or one of --override-opt-param-scheduler and "
        "--use-checkpoint-opt-param-scheduler",
    ),
    (
        re.compile("split must be provided when blend is not None"),
        "--data-args-path needs --split; give the shares of training, validation and test, such as --split 969,30,1",
    ),
    (
        re.compile(r"Unable to find address for: (\S+)"),
        r"\1 (GLOO_SOCKET_IFNAME) is no network interface of this host; ip addr lists them",
    ),
    (
        re.compile(
            r"NCCL error in: .*Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device \S+", re.DOTALL
        ),
        r"ranks \1 and \2 use one GPU; what starts the ranks, such as torchrun, must set LOCAL_RANK to their number on "
        "their host",
    ),
    (
        re.compile(r"CUDA error: invalid device ordinal.*", re.DOTALL),
        "LOCAL_RANK is the number of no GPU of this host; start as many ranks on it as it has GPUs, or as "
        "CUDA_VISIBLE_DEVICES lists",
    ),
    # The place in a library's source
    (
        re.compile(r"\[\S+\.(?:cc|cpp|cu|h):\d+\]:? ?|\[enforce fail at [^\]]*\] (?:[^.]* [!=]= [^.]*\. )?"),
        "",
    ),
    (_LOST_PEER, _on_lost_peers),
    (_TIMED_OUT, _on_time),
)


def add_file_name(error: BaseException) -> None:
    """Give an error of a full disk the name of the file that was being written, which Python leaves out. Of several
    open files it is the one whose disk has the least room."""
    if not isinstance(error, OSError) or error.filename or error.errno not in _OF_DISKS:
        return
    for values in _locals_of(error):
        written = [value.name for value in values if _is_written(value)]
        if written:
            error.filename = min(written, key=_free_bytes)
            return


def name_of_read_file(error: BaseException) -> str:
    """The name of the file whose content is at fault, which the messages of parsers leave out; empty if there is none.
    A parser may be called by any function that has opened a file. For other errors, only files of the function at fault
    and of its caller count."""
    is_of_parser = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, EOFError, pickle.UnpicklingError))
    if not is_of_parser and not isinstance(error, (ValueError, TypeError, LookupError, AttributeError)):
        return ""
    most_functions = None if is_of_parser else 2
    for values in islice(_locals_of(error), most_functions):
        for value in values:
            if _is_read(value):
                return str(value.name)
    return ""


def _locals_of(error: BaseException) -> Iterator[Sequence[Any]]:
    """The values of the local variables of each function in the traceback, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield list(frame.f_locals.values())


def _is_named_file(value: Any) -> bool:
    return isinstance(value, io.IOBase) and isinstance(getattr(value, "name", None), str)


def _is_read(value: Any) -> bool:
    """Whether a value is a named file that was opened for reading only, even if it is closed now."""
    return _is_named_file(value) and getattr(value, "mode", "w") in ("r", "rb")


def _is_written(value: Any) -> bool:
    """Whether a value is a named file that was opened for writing, even if it is closed now."""
    return _is_named_file(value) and not _is_read(value)


def _free_bytes(file: str) -> float:
    """The free bytes of the disk that holds the file; infinite if that cannot be read."""
    with suppress(OSError):
        return shutil.disk_usage(_folder_of(file)).free
    return math.inf


def _folder_of(file: str) -> Path:
    return next(folder for folder in Path(file).absolute().parents if folder.is_dir())


def advice_on(error: OSError) -> str:
    """Advice to append to the message of an error of a file; empty if the message says all."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    free = _free_bytes(error.filename) / 2**20
    return f"; {_folder_of(error.filename)} has {free:.0f} MiB free: make room, or write elsewhere"


def hidden_package(error: BaseException) -> str | None:
    """A sentence about a file that hides an installed package, if that is why an import or a use of the package failed;
    else None."""
    if isinstance(error, ImportError):
        name = error.name
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    else:
        return None
    for module, file, installed in _copies(name or ""):
        if not Path(file).resolve().is_relative_to(installed.resolve()):
            return (
                f"{file} is imported as {module} and hides {installed}; take its folder out of PYTHONPATH, or rename it"
            )
    return None


def _copies(name: str) -> Iterator[tuple[str, str, Path]]:
    """Yield (name, imported file, installed folder) for a module and each package that holds it; a module of Python's
    own has the folder of all."""
    parts = name.split(".")
    of_python = getattr(sys.modules.get(parts[0]), "__file__", None)
    if parts[0] in sys.stdlib_module_names and of_python:
        yield parts[0], of_python, Path(sysconfig.get_path("stdlib"))
        return
    for distribution_name in packages_distributions().get(parts[0], ()):
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            file = getattr(sys.modules.get(module), "__file__", None)
            installed = Path(str(distribution(distribution_name).locate_file("/".join(parts[:depth]))))
            if file and installed.is_dir():
                yield module, file, installed
