"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of
either. Out: one pair, to be named in training as ``--data-path PREFIX``. The tokenizer is any of
Megatron's, chosen by Megatron's own flags, or a byte-level BPE trained here on the same input:

    seq1f1b preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The files get their names when they are complete.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatch
from itertools import batched, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..schedule import written_whole
from .parsing import Parser, count

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BATCH = 64  # documents: worth a message to a worker, and bounded in memory
EOD, PAD = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two special tokens


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, or folders that are searched to any depth")
    jsonl = f"a document a line; auto (default): jsonl for {' '.join(JSON_SUFFIXES)}, else a document a file"
    add("--input-format", choices=("auto", "jsonl", "text"), default="auto", help=f"jsonl: {jsonl}")
    keys = "keys of the texts in a JSON object, a pair each: PREFIX_KEY_document (default: text, in PREFIX)"
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY", help=keys)
    add("--max-documents", type=count, metavar="N", help="stop after the first N documents of the input")
    add("--glob", default="*", metavar="PATTERN", help="names of files to take from a folder, such as '*.py'")
    add("--exclude", nargs="+", default=[], metavar="PATTERN", help="names of files and subfolders to leave out")
    unusable = "a document that is empty, unreadable, not UTF-8, bad JSON, or without the key"
    add("--on-error", choices=("stop", "skip"), default="stop", help=f"{unusable}: stop (default), or report and skip")

    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="PREFIX.bin and PREFIX.idx; training's --data-path")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end token")
    add("--overwrite", action="store_true", help="replace an existing pair (and, with --train-tokenizer, tokenizer)")
    names = "write PREFIX_text_document.bin and .idx, as Megatron's own tool names them"
    add("--upstream-names", action="store_true", help=names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--workers", type=count, default=cores, metavar="N", help="processes that tokenize (default: one a core)")

    add = parser.add_argument_group("tokenizer", "Megatron's flags, with Megatron's meaning.").add_argument
    train = "first train a byte-level BPE of this size on the input and save it in the folder --tokenizer-model"
    add("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help=train)
    add("--tokenizer-type", default="HuggingFaceTokenizer")
    add("--tokenizer-model", metavar="PATH")
    add("--tokenizer-metadata", dest="metadata_path", metavar="FILE")
    add("--vocab-file", metavar="FILE")
    add("--merge-file", metavar="FILE")
    add("--vocab-size", type=int, help="for NullTokenizer and TikTokenizer")
    add("--null-tokenizer-eod-id", type=int)
    add("--tokenizer-special-tokens", nargs="+", dest="special_tokens")
    add("--tiktoken-pattern", choices=("v1", "v2"))
    add("--tiktoken-num-special-tokens", type=int, default=1000)
    add("--tokenizer-sentencepiece-legacy", action="store_true")
    ignored_spaces = "--tokenizer-sentencepiece-ignore-extra-whitespaces"
    add(ignored_spaces, default=True, action=argparse.BooleanOptionalAction)
    add("--tokenizer-hf-no-use-fast", action="store_true")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true")
    add("--trust-remote-code", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check(args)
    warnings.simplefilter("ignore")  # Megatron warns of optional packages, which are not used here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are deleted
    files = find_files(args.input, args.glob, args.exclude)
    if args.train_tokenizer is not None:
        train_tokenizer(args, files)
    tokenizer = load_tokenizer(args)
    for key in args.json_keys:
        write_pair(args, key, files, tokenizer)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what cannot work, before any work is done."""
    trains, is_hugging_face = args.train_tokenizer is not None, args.tokenizer_type == "HuggingFaceTokenizer"
    if args.output_prefix.endswith("/"):
        raise ValueError(f"--output-prefix {args.output_prefix} is a folder; add a name, as in data/corpus")
    if trains and not is_hugging_face:
        raise ValueError(f"--train-tokenizer makes a HuggingFaceTokenizer; drop --tokenizer-type {args.tokenizer_type}")
    if is_hugging_face and not args.tokenizer_model:
        raise ValueError("name a tokenizer's folder with --tokenizer-model DIR; --train-tokenizer makes one")
    if trains and args.train_tokenizer < SMALLEST_VOCABULARY:
        raise ValueError(f"--train-tokenizer {args.train_tokenizer} is too small; bytes make {SMALLEST_VOCABULARY}")
    outputs = [Path(output_prefix(args, key) + suffix) for key in args.json_keys for suffix in (".bin", ".idx")]
    for path in [*outputs, *([Path(args.tokenizer_model, "tokenizer.json")] if trains else [])]:
        if path.is_dir() or (path.exists() and not args.overwrite):
            way_out = "" if path.is_dir() else ", or add --overwrite"
            raise ValueError(f"{path} exists; choose another name{way_out}")


def output_prefix(args: argparse.Namespace, key: str) -> str:
    """The prefix of the pair of a key; with several keys, and on request, named as by Megatron's own tool."""
    is_named = args.upstream_names or len(args.json_keys) > 1
    return f"{args.output_prefix}_{key}_document" if is_named else args.output_prefix


def find_files(inputs: Iterable[str], glob: str, exclude: Iterable[str]) -> list[str]:
    """All input files, folders in sorted order; one that cannot be read is reported when it is opened."""

    def is_taken(name: str, pattern: str) -> bool:
        return fnmatch(name, pattern) and not any(fnmatch(name, other) for other in exclude)

    files: list[str] = []
    for given in inputs:
        if not os.path.exists(given):
            raise ValueError(f"--input {given} does not exist")
        if not os.path.isdir(given):
            files.append(given)
            continue
        for folder, subfolders, names in os.walk(given, onerror=lambda error: files.append(error.filename)):
            subfolders[:] = sorted(name for name in subfolders if is_taken(name, "*"))
            paths = (os.path.join(folder, name) for name in sorted(names) if is_taken(name, glob))
            # A pipe or socket would block for ever; a broken link is kept, to be reported.
            files.extend(path for path in paths if os.path.isfile(path) or not os.path.exists(path))
    if not files:
        raise ValueError(f"no file under --input {' '.join(inputs)} matches --glob '{glob}'")
    return files


class Reader:
    """Reads the texts of all files in order. `skipped` counts the bad documents by what is wrong with them."""

    def __init__(self, args: argparse.Namespace, files: list[str], is_quiet: bool = False) -> None:
        self._args, self._files, self._is_quiet = args, files, is_quiet
        self.skipped: Counter[str] = Counter()

    def texts(self, key: str, progress: Callable[[int], Any] = lambda num_bytes: None) -> Iterator[tuple[str, str]]:
        """(place, text) of each document that has a text, which is under `key` in a JSON object."""
        for place, raw, is_json in islice(self._documents(), self._args.max_documents):
            progress(len(raw))
            try:
                yield place, text_of(raw, key, is_json)
            except ValueError as bad:
                self.skip(place, str(bad))

    def skip(self, place: str, problem: str) -> None:
        """Report a bad document; with --on-error stop raises ValueError."""
        if self._args.on_error == "stop":
            raise ValueError(f"{place}: {problem}; mend or remove it, or use --on-error skip")
        self.skipped[problem.partition(":")[0]] += 1
        if not self._is_quiet:
            tqdm.write(f"skipped {place}: {problem}", file=sys.stderr)

    def _documents(self) -> Iterator[tuple[str, bytes, bool]]:
        for path in self._files:
            form = self._args.input_format
            is_json = form == "jsonl" or (form == "auto" and path.endswith(JSON_SUFFIXES))
            try:
                with open(path, "rb") as stream:
                    if is_json:
                        yield from ((f"{path}:{number}", line, True) for number, line in enumerate(stream, 1))
                    else:
                        yield path, stream.read(), False
            except OSError as error:
                self.skip(path, f"unreadable: {error.strerror}")


def text_of(raw: bytes, key: str, is_json: bool) -> str:
    """The text of a document, which is under `key` in a JSON object. Raises ValueError."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if is_json and text.strip():
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"bad JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        if not isinstance(found.get(key), str):
            raise ValueError(f"key '{key}' is not a string" if key in found else f"no key '{key}' (--json-keys)")
        text = found[key]
    if not text.strip():
        raise ValueError("empty")
    return text


def train_tokenizer(args: argparse.Namespace, files: list[str]) -> None:
    """Train a byte-level BPE on all documents; save what a HuggingFaceTokenizer is read from."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.train_tokenizer,
        special_tokens=[AddedToken(EOD, special=True), AddedToken(PAD, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    reader = Reader(args, files, is_quiet=True)  # what it skips is reported when it is tokenized
    tokenizer.train_from_iterator((text for key in args.json_keys for _, text in reader.texts(key)), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "pad_token": PAD}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1 << 62}
    folder = Path(args.tokenizer_model)
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / "tokenizer.json") as path, written_whole(folder / "tokenizer_config.json") as beside:
        beside.write_text(json.dumps(config, indent=2))
        tokenizer.save(str(path))
    print(f"Tokenizer of {tokenizer.get_vocab_size()} tokens saved in {folder}.", flush=True)


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Megatron's tokenizer of the flags. Raises ValueError."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    unused = dict(pad_vocab_size=False, chat_template=None, null_tokenizer_pad_id=-1)  # build_tokenizer reads them
    try:
        tokenizer = build_tokenizer(argparse.Namespace(**vars(args), **unused))
    except Exception as error:  # whatever the libraries raise
        raise ValueError(
            f"cannot load the {args.tokenizer_type} (--tokenizer-model, --vocab-file, ...): {type(error).__name__}: "
            f"{error}"
        ) from None
    if args.append_eod and end_of(tokenizer) not in range(tokenizer.vocab_size):
        raise ValueError(
            f"the {args.tokenizer_type} has no end token in its vocabulary: take another tokenizer, or leave out "
            "--append-eod"
        )
    return tokenizer


def end_of(tokenizer: Any) -> int | None:
    try:
        return tokenizer.eod
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None  # some libraries raise where they have no such token


class Encoder:
    """Turns texts into ids of the smallest type that holds the vocabulary."""

    def __init__(self, tokenizer: Any, append_eod: bool) -> None:
        from megatron.core.datasets.indexed_dataset import DType

        self._tokenizer = tokenizer
        self._end = [tokenizer.eod] if append_eod else []
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray | str]:
        """The ids of each text, or what is wrong with it."""
        try:
            return [self._checked(ids) for ids in self._ids(texts)]
        except Exception as error:  # whatever the libraries raise, for one of the documents
            if len(texts) == 1:
                return [f"the tokenizer refused it: {error}"]
            return [self.encode([text])[0] for text in texts]

    def _ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        library = getattr(self._tokenizer, "_tokenizer", None)
        if not hasattr(library, "include_special_tokens"):
            return map(self._tokenizer.tokenize, texts)
        # Hugging Face's take many texts in one call, which is faster.
        special = library.include_special_tokens
        return library.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)["input_ids"]

    def _checked(self, ids: Sequence[int]) -> np.ndarray | str:
        if not ids:
            return "empty"
        if min(ids) < 0 or max(ids) >= self._tokenizer.vocab_size:
            return f"token id outside the vocabulary of {self._tokenizer.vocab_size}"
        return np.array([*ids, *self._end], self.dtype)


def encoded(
    texts: Iterable[tuple[str, str]], encoder: Encoder, num_workers: int
) -> Iterator[tuple[str, np.ndarray | str]]:
    """The (place, text) of all documents in order, through processes; ids, or what is wrong, in place of a text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Forks share what is imported and the tokenizer with this process, in memory and in time.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"), _start_worker, (encoder,))
    pending: deque[tuple[Sequence[str], Future]] = deque()
    batches = batched(texts, BATCH)
    try:
        while (batch := next(batches, ())) or pending:
            if batch:
                places, of_batch = zip(*batch, strict=True)
                pending.append((places, pool.submit(_work, of_batch)))
            if not batch or len(pending) > num_workers + 1:
                places, future = pending.popleft()
                yield from zip(places, future.result(), strict=True)
    except BrokenProcessPool:
        raise ValueError("a worker died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all, and the parent acts on it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    _work.encoder = encoder


def _work(texts: Sequence[str]) -> list[np.ndarray | str]:
    return _work.encoder.encode(texts)


def write_pair(args: argparse.Namespace, key: str, files: list[str], tokenizer: Any) -> None:
    """Tokenize the texts under a key into a pair."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, encoder, reader = output_prefix(args, key), Encoder(tokenizer, args.append_eod), Reader(args, files)
    num_documents = num_tokens = 0
    total = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc=Path(prefix).name) as bar,
        written_whole(f"{prefix}.idx") as index,
        written_whole(f"{prefix}.bin") as binary,
    ):
        builder = IndexedDatasetBuilder(str(binary), dtype=encoder.dtype)
        for place, ids in encoded(reader.texts(key, bar.update), encoder, args.workers):
            if isinstance(ids, str):
                reader.skip(place, ids)
                continue
            builder.add_document(ids, [len(ids)])
            num_documents += 1
            num_tokens += len(ids)
        if not num_documents:
            raise ValueError(f"none of the {reader.skipped.total()} document(s) can be used")
        builder.finalize(str(index))
        Path(f"{prefix}.idx").unlink(missing_ok=True)  # beside another run's .bin it would be wrong
    print(f"{num_documents:,} documents, {num_tokens:,} tokens.")
    if reader.skipped:
        reasons = ", ".join(f"{number} {problem}" for problem, number in reader.skipped.most_common())
        print(f"Skipped {reader.skipped.total()}: {reasons}.")
    print(f"Train on it with --data-path {prefix}", flush=True)
