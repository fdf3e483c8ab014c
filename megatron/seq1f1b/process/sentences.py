"""One sentence for a failure: what was being done, the message of the exception, and the file with its traceback.

Tested in process/test_net.py.
"""

import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, TextIO

from .causes import add_file_name, advice_on, hidden_package, in_plain_words, name_of_read_file
from .flags_at_fault import flags_of_check, flags_of_listed_path, flags_of_path, with_flags

# What Megatron is doing in some of its functions; the names in braces are values of their `args`.
_ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "validate_args": "checking the flags",
        "parse_str_to_list": "reading --pipeline-model-parallel-layout",
        "validate_layer_layout": "checking --pipeline-model-parallel-layout",
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
# Megatron asks the hub for the settings of a tokenizer whose files are all here.
_GPT2_WITHOUT_HUB = (
    "put vocab.json, merges.txt and a tokenizer_config.json with the text "
    '{"tokenizer_class": "GPT2Tokenizer"} into a folder, and give that by --tokenizer-type HuggingFaceTokenizer '
    "--tokenizer-model"
)
_LITTLE = 2**20  # bytes
_LONGEST = 400  # characters of an exception's words: some hold whole state dictionaries
_OF_TRAINING = ("megatron", "tokenizers", "torch", "tqdm")  # packages of the extra `train`
_SCRIPTS = ("__main__", "pretrain_gpt", "pretrain_hybrid")


def say(sentence: str, trace: str | None = None, stream: TextIO | None = None) -> None:
    """Print one sentence, given without its full stop, with the name of the file into which `trace` is written. Further
    lines of `sentence` are printed below it: a picture of the place that it speaks of."""
    sentence, _, picture = sentence.strip().partition("\n")
    ending = "" if trace is None else f"; the traceback is in {_saved(trace)}"
    sentence = sentence.rstrip(".:") + ending
    lines = [f"error: {sentence}{'' if sentence.endswith('?') else '.'}", *picture.splitlines()]
    with suppress(OSError):  # what it prints to may be full
        sys.stdout.flush()  # else its output would come last
    print("\n".join(lines), file=stream or sys.stderr, flush=True)


def _saved(trace: str) -> str:
    """Save a traceback; returns the name of its file. A full disk must not hide the sentence."""
    new = partial(
        tempfile.NamedTemporaryFile,
        "w",
        encoding="utf-8",
        errors="backslashreplace",  # of bytes in paths that are no text
        prefix="seq1f1b-traceback-",
        suffix=".txt",
        delete=False,
    )
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
    return isinstance(error, KeyboardInterrupt) or (is_ours and isinstance(error, (ValueError, ImportError)))


def sentence_of(error: BaseException, flags: Mapping[str, str] = MappingProxyType({})) -> str:
    """What was being done, and the message of the error, without a full stop. `flags` are the spellings of the
    program's flags, by the names of their values."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if (sentence := hidden_package(error)) is not None:
        return sentence
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        what = "'.[train]' in the repository of this package" if package in _OF_TRAINING else package
        return f"the package {error.name} is missing; pip install {what} brings it"
    words = _words(error, flags)
    if is_mistake(error):
        return words
    root = _root_cause(error)
    if root is not error and not isinstance(root, SystemExit):
        words_of_root = _words(root, flags)
        if words_of_root not in words:
            words = f"{words} ({words_of_root})"
    for frame in reversed(_frames(error)):
        function = frame.f_code.co_name
        if action := _ACTIONS.get(function):
            values = defaultdict(str, getattr(frame.f_locals.get("args"), "__dict__", {}))
            values["load"] = values["load"] or values["pretrained_checkpoint"]
            addition = _addition(function, error, values)
            if addition:
                words = words.rstrip(".")
            return f"{action.format_map(values)} failed: {words}{addition}"
    return words


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _addition(function: str, error: BaseException, values: Mapping[str, Any]) -> str:
    """What the sentence adds to the message of an error in a `function` of `_ACTIONS`; begins with a semicolon, or is
    empty."""
    if function == "save_checkpoint":  # which is noted, with the room that is left
        return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if function != "build_tokenizer":
        return ""
    if not (values["tokenizer_model"] or values["vocab_file"]):
        return "; name its files, by --tokenizer-model or by --vocab-file and --merge-file"
    if "couldn't connect to" in str(error) and values["tokenizer_type"] == "GPT2BPETokenizer":
        return f"; {_GPT2_WITHOUT_HUB}"
    return ""


def _words(error: BaseException, flags: Mapping[str, str]) -> str:
    """The message of an error, with the flags and the files that it speaks of."""
    add_file_name(error)
    if isinstance(error, OSError) and error.strerror:
        return _words_of_os_error(error, flags)
    if getattr(error, "has_picture", False):  # such as a schedule's, which shows the ranks below each other
        return str(error)
    if isinstance(error, StopIteration):
        return "a data iterator ended early; give more data, or run fewer steps (--train-iters, --eval-iters)"
    text = _message_of(error)
    if isinstance(error, MemoryError) and not text:
        text = "the memory of this host is full; look at the sizes of the model and of a micro-batch"
    values = flags_of_check(error, flags, text)
    if not is_mistake(error):
        text = with_flags(text, flags) + flags_of_listed_path(error, text, flags)
    if isinstance(error, AssertionError) and not text:
        text = f"{_failed_statement(error)}{values} does not hold"
    elif isinstance(error, ZeroDivisionError):
        text = f"{text} in {_failed_statement(error)}{values}"
    elif " " not in text:  # such as that of a KeyError
        kind = type(error).__name__
        text = f"{kind}: {text}{values}" if text else f"{kind}{values}"
    elif values and len(text) <= _LONGEST:
        text = text.rstrip(".") + values
    file = name_of_read_file(error)
    if file and file not in text:
        text = f"{flags_of_path(error, file, flags)}: {text}"
    return text if len(text) <= _LONGEST + len(values) else f"{text[:_LONGEST]} ..."


def _words_of_os_error(error: OSError, flags: Mapping[str, str]) -> str:
    message = error.strerror or ""
    if not error.filename:
        return f"{message}{flags_of_check(error, flags, message)}{_full_disks()}"
    file = flags_of_path(error, os.fsdecode(error.filename), flags)
    return f"{file}: {message}{advice_on(error)}"


def _message_of(error: BaseException) -> str:
    """The message of an error in one line; of an error with the traceback of another process, the message of that."""
    text = in_plain_words(str(error))
    if "Traceback (most recent call last)" in text:
        not_indented = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
        text = re.sub(r"^[\w.]+\.(\w+: )", r"\1", not_indented[-1])  # without the module of the exception
    return " ".join(text.split())


def _full_disks() -> str:
    """A clause on the disks of the current and the temporary folder that are full; empty if none is. Libraries write to
    these without being asked to."""
    with suppress(OSError):
        folders = dict.fromkeys((os.getcwd(), tempfile.gettempdir()))
        full = [folder for folder in folders if shutil.disk_usage(folder).free < _LITTLE]
        return f"; the disk of {' and of '.join(full)} is full" if full else ""
    return ""


def _failed_statement(error: BaseException) -> str:
    """The first line of the statement that failed."""
    if error.__traceback__ is None:
        return "a check"
    source = traceback.extract_tb(error.__traceback__)[-1].line or "a check"
    return source.replace("args.", "")


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
