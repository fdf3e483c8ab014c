"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of
either. Out: one pair, to be named in training as ``--data-path PREFIX``. The tokenizer is any of
Megatron's, chosen by Megatron's own flags, or a byte-level BPE trained here on the same input:

    seq1f1b preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The two files are written beside their names, which they get when they are complete.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from .parsing import Parser, count

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 18, 1024
EOD, PAD = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two special tokens
_CALLS = "__call__", "_encode_plus", "_batch_encode_plus"  # by which transformers, 4 or 5, goes from a text to ids


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
    for flag in ("--partitions", "--log-interval"):
        add(flag, type=count, metavar="N", help="of Megatron's own tool; accepted, and without effect on the pair")

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
    # Megatron warns of parts that it does not find, and that are not used here.
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files go
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
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
    if trains and not is_hugging_face:
        raise ValueError(f"--train-tokenizer makes a HuggingFaceTokenizer; drop --tokenizer-type {args.tokenizer_type}")
    if is_hugging_face and not args.tokenizer_model:
        raise ValueError("name a tokenizer's folder with --tokenizer-model DIR; --train-tokenizer makes one")
    if trains and args.train_tokenizer < SMALLEST_VOCABULARY:
        raise ValueError(f"--train-tokenizer {args.train_tokenizer} is too small; bytes make {SMALLEST_VOCABULARY}")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ValueError(f"--json-keys {' '.join(args.json_keys)} names a key twice")
    outputs = [Path(output_prefix(args, key) + suffix) for key in args.json_keys for suffix in (".bin", ".idx")]
    for path in [*outputs, *([Path(args.tokenizer_model, "tokenizer.json")] if trains else [])]:
        if path.is_dir() or (path.exists() and not args.overwrite):
            way_out = "" if path.is_dir() else ", or add --overwrite"
            raise ValueError(f"{path} exists; choose another name{way_out}")


def output_prefix(args: argparse.Namespace, key: str) -> str:
    """The prefix of the pair of a key: with several keys, and on request, the one that upstream's tool gives it."""
    is_named = args.upstream_names or len(args.json_keys) > 1
    return f"{args.output_prefix}_{key}_document" if is_named else args.output_prefix


class BadDocument(ValueError):
    """A document that cannot be used; the text has the reason."""


class Document(NamedTuple):
    """A document as it lies in its file, undecoded, or the reason why it cannot be read."""

    place: str
    raw: bytes
    is_json: bool
    error: str = ""

    def text(self, key: str) -> str:
        """Its text, which is under `key` in a JSON object. Raises BadDocument."""
        if self.error:
            raise BadDocument(self.error)
        try:
            text = self.raw.decode("utf-8-sig")
            if self.is_json and text.strip():
                text = _under(json.loads(text), key)
        except UnicodeDecodeError as error:
            raise BadDocument(f"not UTF-8: {error.reason} at byte {error.start}") from None
        except json.JSONDecodeError as error:
            raise BadDocument(f"bad JSON: {error.msg} at column {error.colno}") from None
        except RecursionError as error:
            raise BadDocument(f"bad JSON: {error}") from None
        if not text.strip():
            raise BadDocument("empty")
        return text


def _under(value: object, key: str) -> str:
    if not isinstance(value, dict):
        raise BadDocument("not a JSON object")
    if key not in value:
        raise BadDocument(f"no key '{key}' (--json-keys)")
    if not isinstance(value[key], str):
        raise BadDocument(f"key '{key}' is not a string")
    return value[key]


def refusal(place: str, reason: str) -> ValueError:
    return ValueError(f"{place}: {reason}; mend or remove it, or use --on-error skip")


def find_files(inputs: Iterable[str], glob: str, exclude: Iterable[str]) -> list[str]:
    """All input files, folders in sorted order; one that cannot be read is reported when it is opened."""
    files: list[str] = []
    for given in inputs:
        if not os.path.exists(given):
            raise ValueError(f"--input {given} does not exist")
        if not os.path.isdir(given):
            files.append(given)
            continue
        for folder, subfolders, names in os.walk(given, onerror=lambda error: files.append(error.filename)):
            subfolders[:] = sorted(name for name in subfolders if not any(fnmatch(name, other) for other in exclude))
            for name in sorted(names):
                path = os.path.join(folder, name)
                # A pipe or socket would block for ever; a broken link is kept, to be reported.
                is_usable = os.path.isfile(path) or not os.path.exists(path)
                if is_usable and fnmatch(name, glob) and not any(fnmatch(name, other) for other in exclude):
                    files.append(path)
    if not files:
        raise ValueError(f"no file under --input {' '.join(inputs)} matches --glob '{glob}'")
    return files


def read_documents(files: Iterable[str], input_format: str) -> Iterator[Document]:
    """The documents of all files in order."""
    for path in files:
        is_json = input_format == "jsonl" or (input_format == "auto" and path.endswith(JSON_SUFFIXES))
        try:
            with open(path, "rb") as stream:
                if is_json and stream.peek(1):
                    yield from (Document(f"{path}:{number}", raw, True) for number, raw in enumerate(stream, 1))
                else:
                    yield Document(path, stream.read(), is_json)
        except OSError as error:
            yield Document(path, b"", is_json, f"unreadable: {error.strerror}")


def batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches that are worth a message to a worker and bounded in memory."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.raw)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Tokenizer(NamedTuple):
    """`encode` returns the ids of each text."""

    encode: Callable[[list[str]], list[list[int]]]
    vocab_size: int
    eod: int | None


def train_tokenizer(args: argparse.Namespace, files: list[str]) -> None:
    """Train a byte-level BPE on all documents; save what a HuggingFaceTokenizer is read from."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Rust

    def texts() -> Iterator[str]:
        for document in islice(read_documents(files, args.input_format), args.max_documents):
            for key in args.json_keys:
                try:
                    yield document.text(key)
                except BadDocument as bad:  # skipped ones are reported when they are tokenized
                    if args.on_error == "stop":
                        raise refusal(document.place, str(bad)) from None

    tokenizer = Rust(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.train_tokenizer,
        special_tokens=[AddedToken(EOD, special=True), AddedToken(PAD, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "pad_token": PAD}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1 << 62}
    folder = Path(args.tokenizer_model)
    with written_beside(folder / "tokenizer_config.json", folder / "tokenizer.json") as (config_path, path):
        config_path.write_text(json.dumps(config, indent=2))
        tokenizer.save(str(path))
    print(f"Tokenizer of {tokenizer.get_vocab_size()} tokens saved in {folder}.", flush=True)


def load_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of the flags. Raises ValueError."""
    try:
        megatron = megatrons_tokenizer(args)
        try:
            eod = megatron.eod
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            eod = None  # some libraries raise where they have no such token
        tokenizer = Tokenizer(encoder_of(megatron), megatron.vocab_size, eod)
    except Exception as error:  # whatever the libraries raise
        raise ValueError(
            f"cannot load the {args.tokenizer_type} (--tokenizer-model, --vocab-file, ...): {type(error).__name__}: "
            f"{error}"
        ) from None
    if args.append_eod and tokenizer.eod not in range(tokenizer.vocab_size):
        raise ValueError(
            f"the {args.tokenizer_type} has no end token in its vocabulary: take another tokenizer, or leave out "
            "--append-eod"
        )
    return tokenizer


def megatrons_tokenizer(args: argparse.Namespace) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # What build_tokenizer reads, but is of no use here.
    unused = dict(pad_vocab_size=False, chat_template=None, null_tokenizer_pad_id=-1)
    return build_tokenizer(argparse.Namespace(**vars(args), **unused))


def encoder_of(megatron: Any) -> Callable[[list[str]], list[list[int]]]:
    """The ids that `megatron.tokenize` makes of each text; in one call where it is a fast one of Hugging Face."""
    library = getattr(megatron, "_tokenizer", None)
    tokenizer = getattr(library, "tokenizer", None)
    if hasattr(library, "include_special_tokens") and getattr(tokenizer, "is_fast", False):
        from transformers import PreTrainedTokenizerFast as Fast

        # A class with a call of its own changes texts or ids in Python.
        if all(getattr(type(tokenizer), name, None) is getattr(Fast, name, None) for name in _CALLS):
            tokenizer("")  # leaves its Rust tokenizer without truncation and padding, with its rule for special tokens
            # Without positions in the text, of which training has no use.
            encode = partial(
                tokenizer.backend_tokenizer.encode_batch_fast, add_special_tokens=library.include_special_tokens
            )
            return lambda texts: [encoding.ids for encoding in encode(texts)]
    return lambda texts: [list(megatron.tokenize(text)) for text in texts]


class Tokens(NamedTuple):
    """A batch, tokenized: the lengths of its documents, and their ids one after another."""

    lengths: list[int]
    ids: np.ndarray
    problems: list[tuple[str, str]]  # place, reason
    num_bytes: int


def tokenize(batch: list[Document], tokenizer: Tokenizer, dtype: Any, key: str, append_eod: bool) -> Tokens:
    """The texts under `key`, with ids of `dtype`."""
    texts, places, documents, problems = [], [], [], []
    for document in batch:
        try:
            texts.append(document.text(key))
            places.append(document.place)
        except BadDocument as bad:
            problems.append((document.place, str(bad)))
    for place, ids in zip(places, _ids(texts, tokenizer), strict=True):
        if isinstance(ids, BadDocument):
            problems.append((place, str(ids)))
        else:
            documents.append([*ids, tokenizer.eod] if append_eod else ids)
    lengths = list(map(len, documents))
    ids_of_all = np.fromiter(chain.from_iterable(documents), dtype, sum(lengths))
    return Tokens(lengths, ids_of_all, problems, sum(len(document.raw) for document in batch))


def _ids(texts: list[str], tokenizer: Tokenizer) -> list[list[int] | BadDocument]:
    try:
        documents = tokenizer.encode(texts)
    except Exception as error:  # whatever the libraries raise, it belongs to one document
        if len(texts) == 1:
            return [BadDocument(f"the tokenizer refused it: {error}")]
        return [_ids([text], tokenizer)[0] for text in texts]
    outside = f"token id outside the vocabulary of {tokenizer.vocab_size}"
    return [
        ids if ids and min(ids) >= 0 and max(ids) < tokenizer.vocab_size else BadDocument(outside if ids else "empty")
        for ids in documents
    ]


def tokenized(batches: Iterable[list[Document]], num_workers: int, *how: Any) -> Iterator[Tokens]:
    """All batches in order, through processes; `how` has the further arguments of `tokenize`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    gc.freeze()  # what was imported is not searched for garbage again and again
    # Forks share what is imported and the tokenizer with this process, in memory and in time.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"), _start_worker, how)
    pending = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_work, batch))
            if len(pending) > num_workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a worker died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(*how: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all, and the parent acts on it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    _work.how = how


def _work(batch: list[Document]) -> Tokens:
    return tokenize(batch, *_work.how)


@contextlib.contextmanager
def written_beside(*paths: Path) -> Iterator[list[Path]]:
    """A new path beside each path, which takes its place, in this order, when the block ends without an error."""
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{paths[0].stem}-") as new:
        beside = [Path(new, path.name) for path in paths]
        yield beside
        paths[-1].unlink(missing_ok=True)  # with the others of another run it would be wrong
        for path, final in zip(beside, paths, strict=True):
            path.replace(final)


def write_pair(args: argparse.Namespace, key: str, files: list[str], tokenizer: Tokenizer) -> None:
    """Tokenize the texts under a key into a pair."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = output_prefix(args, key)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    skipped: Counter[str] = Counter()
    num_documents = num_tokens = 0
    batches = batched(islice(read_documents(files, args.input_format), args.max_documents))
    total = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc=Path(prefix).name) as bar,
        written_beside(Path(f"{prefix}.bin"), Path(f"{prefix}.idx")) as (bin_path, idx_path),
    ):
        builder = IndexedDatasetBuilder(str(bin_path), dtype=dtype)
        for tokens in tokenized(batches, args.workers, tokenizer, dtype, key, args.append_eod):
            for place, reason in tokens.problems:
                if args.on_error == "stop":
                    raise refusal(place, reason)
                tqdm.write(f"skipped {place}: {reason}", file=sys.stderr)
                skipped[reason.partition(":")[0]] += 1
            start = 0
            for length in tokens.lengths:
                builder.add_document(tokens.ids[start : start + length], [length])
                start += length
            num_documents += len(tokens.lengths)
            num_tokens += start
            bar.update(tokens.num_bytes)
        if not num_documents:
            raise ValueError(f"none of the {skipped.total()} document(s) can be used")
        builder.finalize(str(idx_path))
    print(f"{num_documents:,} documents, {num_tokens:,} tokens.")
    if skipped:
        print(f"Skipped {skipped.total()}: {', '.join(f'{n} {reason}' for reason, n in skipped.most_common())}.")
    print(f"Train on it with --data-path {prefix}", flush=True)
