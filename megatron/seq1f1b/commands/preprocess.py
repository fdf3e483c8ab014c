"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of either. Out: one pair, to
be named in training as --data-path PREFIX. The tokenizer is any of Megatron's, chosen by Megatron's own flags, or a
byte-level BPE trained here on the same input:

    seq1f1b preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The files get their names together, when all are complete.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import batched, chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..arguments.flags import number_type
from ..files import converted
from ..process.child_processes import end_with_parent
from ..schedule import reason, written_together
from .parsing import Parser, count_up_to

MOST_WORDS = 10_000_000  # of a vocabulary
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BATCH = 64  # documents: worth a message to a worker
AHEAD = 4  # batches of each worker that are read while those before are written; bounds memory
EOD = "<|endoftext|>"
PAD = "<|padding|>"
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_ENDING = (signal.SIGINT, signal.SIGTERM)
MEND = "mend or remove it, or use --on-error skip"


class Document(NamedTuple):
    place: str
    content: bytes
    is_json: bool


def make_parser() -> Parser:
    parser = Parser(__doc__, epilog="All other flags go to Megatron's tokenizers: --tokenizer-type, --vocab-file, ...")
    add = parser.add_argument
    lines = f"{' '.join(JSON_SUFFIXES)} (also .jsonl.txt)"
    paths = f"files, or folders of any depth; a document a line of {lines}, else a document a file"
    add("--input", nargs="+", required=True, metavar="PATH", help=paths)
    add("--glob", default="*", metavar="PATTERN", help="names of files to take from a folder: '*.py'")
    add("--json-key", "--json-keys", default="text", metavar="KEY", help="of the text; default: text")
    errors = "at a document that is empty, not UTF-8, bad JSON or without the key: stop (default), or skip it"
    add("--on-error", choices=("stop", "skip"), default="stop", help=errors)
    add("--output-prefix", required=True, metavar="PREFIX", help="training's --data-path")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end token")
    add("--overwrite", action="store_true", help="replace an existing pair (and, with --train-tokenizer, tokenizer)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(64, 4 * cores)
    add("--workers", type=count_up_to(most), default=cores, metavar="N", help="processes (default: one a core)")
    train = "first train a byte-level BPE of this size on the input and save it in the folder --tokenizer-model"
    problem = f"not from 258, which bytes make, to {MOST_WORDS:,}"
    size = number_type(int, lambda size: 256 + 2 <= size <= MOST_WORDS, problem)
    add("--train-tokenizer", type=size, metavar="VOCAB_SIZE", help=train)
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Our own flags, with those of Megatron's tokenizers."""
    args, of_tokenizer = make_parser().parse_known_args(argv)
    # Megatron's imports warn of optional packages and of a missing GPU; neither is used here.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = Parser(None)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    parser.set_defaults(tokenizer_type="HuggingFaceTokenizer", pad_vocab_size=False)
    return parser.parse_args(of_tokenizer, args)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    prefix = args.output_prefix
    kind = args.tokenizer_type
    trains = args.train_tokenizer is not None
    if prefix.endswith("/"):
        raise ValueError(f"--output-prefix {prefix} is a folder; add a name, as in data/corpus")
    if kind == "HuggingFaceTokenizer" and not args.tokenizer_model:
        raise ValueError("name a tokenizer's folder with --tokenizer-model DIR; --train-tokenizer makes one")
    if kind != "HuggingFaceTokenizer" and trains:
        raise ValueError(f"--train-tokenizer makes a HuggingFaceTokenizer; drop --tokenizer-type {kind}")
    made = f"{prefix}.bin", f"{prefix}.idx"
    taken = [*made, f"{args.tokenizer_model}/{TOKENIZER}"] if trains else made
    existing = [path for path in map(Path, taken) if path.exists()]
    if existing and not args.overwrite:
        raise ValueError(f"{existing[0]} exists; choose another name, or add --overwrite")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are deleted
    files = find_files(args.input, args.glob)
    if not trains:
        with written_together(*made) as (binary, index):
            printed = write_pair(args, files, Encoder(args), binary, index)
    else:
        folder = Path(args.tokenizer_model)
        with written_together(folder / CONFIG, folder / TOKENIZER, *made) as (config, tokenizer, binary, index):
            size = train_tokenizer(args, files, config, tokenizer)
            trained = argparse.Namespace(**vars(args) | {"tokenizer_model": str(tokenizer.parent)})
            printed = write_pair(args, files, Encoder(trained), binary, index)
        print(f"Tokenizer of {size} tokens saved in {folder}.")
    print(printed)
    print(f"Train on it with --data-path {prefix}")


def find_files(inputs: Iterable[str], glob: str) -> list[Path]:
    """All input files, those of folders in sorted order."""
    files: list[Path] = []
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"--input {given} does not exist")
        if given.is_dir():
            # A pipe or socket in a folder would block for ever.
            files += sorted(path for path in given.rglob(glob) if path.is_file())
        else:
            files.append(given)
    if not files:
        raise ValueError(f"no file under --input {' '.join(inputs)} matches --glob '{glob}'")
    return files


def documents(files: Iterable[Path], progress: Callable[[int], Any] = lambda num_bytes: None) -> Iterator[Document]:
    """The documents of all files, in order; `progress` is called with the size of each."""
    for path in files:
        with path.open("rb") as stream:
            is_json = any(suffix.lower() in JSON_SUFFIXES for suffix in path.suffixes)
            for number, content in enumerate(stream if is_json else [stream.read()], 1):
                progress(len(content))
                yield Document(f"{path}:{number}" if is_json else str(path), content, is_json)


def text_of(document: Document, key: str) -> str:
    """The text of a document, which is under `key` in a JSON object. Raises ValueError."""
    try:
        text = document.content.decode("utf-8-sig")
        if document.is_json:
            text = converted("", json.loads(text), _line(key)).text
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(reason(error)) from None
    if not text.strip():
        raise ValueError("it is empty")
    return text


@cache
def _line(key: str) -> Any:
    """The type of a line of JSON, with the text under `key`."""
    return msgspec.defstruct("Line", [("text", str)], rename={"text": key})


def train_tokenizer(args: argparse.Namespace, files: Sequence[Path], config: Path, path: Path) -> int:
    """Train a byte-level BPE on all documents; write the two files from whose folder a HuggingFaceTokenizer is loaded.
    Returns the size of its vocabulary."""
    from tokenizers import ByteLevelBPETokenizer

    def texts() -> Iterator[str]:
        for document in documents(files):
            try:
                yield text_of(document, args.json_key)
            except ValueError as bad:
                if args.on_error == "stop":  # one that is skipped is reported when it is tokenized
                    raise ValueError(f"{document.place}: {bad}; {MEND}") from None

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts(), args.train_tokenizer, 0, sys.stderr.isatty(), [EOD, PAD])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "pad_token": PAD}
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 1 << 62}
    config.write_text(json.dumps(settings, indent=2))
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return tokenizer.get_vocab_size()


class Encoder:
    """Turns documents into ids of the smallest type that holds the vocabulary, by Megatron's tokenizer of the flags."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core.datasets.indexed_dataset import DType
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        self.tokenizer = build_tokenizer(args)
        self._end = [self.tokenizer.eod] if args.append_eod else []
        if any(token not in range(self.tokenizer.vocab_size) for token in self._end):
            raise ValueError(f"the {args.tokenizer_type} has no end token in its vocabulary; leave out --append-eod")
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        self._key = args.json_key

    def encode(self, batch: Sequence[Document]) -> list[np.ndarray | str]:
        """The ids of each document, or what is wrong with it."""
        library: Any = getattr(self.tokenizer, "_tokenizer", None)
        try:
            texts = [text_of(document, self._key) for document in batch]
            if not hasattr(library, "include_special_tokens"):
                return [self._checked(self.tokenizer.tokenize(text)) for text in texts]
            # Hugging Face's take many texts in one call, which is faster.
            encoded = library.tokenizer(
                texts, add_special_tokens=library.include_special_tokens, return_attention_mask=False
            )
            return [self._checked(ids) for ids in encoded["input_ids"]]
        except Exception as error:  # libraries raise many kinds, for one of the documents
            if len(batch) == 1:
                return [str(error)]
            results = []
            for document in batch:
                results += self.encode([document])
            return results

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        if not ids:
            raise ValueError("it is empty")
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise ValueError(f"token id outside the vocabulary of {self.tokenizer.vocab_size}")
        return np.array([*ids, *self._end], self.dtype)


def encoded(source: Iterable[Document], encoder: Encoder, num_workers: int) -> Iterator[tuple[str, np.ndarray | str]]:
    """The place of each document, in order, and its ids or what is wrong with it, made by worker processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Forks share imports and the tokenizer with this process, which saves memory and time.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"), _start_worker, (encoder,))
    next_ones: Iterable[list] = ()
    try:
        _start(pool)
        # While the results of some batches are written, workers are at the next; nothing follows the last.
        for batches in chain(batched(batched(source, BATCH), AHEAD * num_workers), [()]):
            results = next_ones
            next_ones = pool.map(_work, batches)
            yield from chain.from_iterable(results)
    except BrokenProcessPool:
        way_out = f"try fewer than --workers {num_workers}" if num_workers > 1 else "cut the longest documents"
        raise ValueError(f"a process that tokenizes was killed, as happens where memory is short; {way_out}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(pool: ProcessPoolExecutor) -> None:
    """Start all workers. A signal between two of them would end this process with workers that nobody ends: it would
    wait for them for ever. So it is held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """The state of a process that tokenizes, between its batches."""

    encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all, and the parent acts on it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    end_with_parent()
    _Worker.encoder = encoder


def _work(batch: Sequence[Document]) -> list[tuple[str, np.ndarray | str]]:
    """The place of each document of a batch, and its ids or what is wrong with it."""
    places = [document.place for document in batch]
    return list(zip(places, _Worker.encoder.encode(batch), strict=True))


def write_pair(args: argparse.Namespace, files: Sequence[Path], encoder: Encoder, binary: Path, index: Path) -> str:
    """Write tokens and their index; returns what to print of them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tqdm import tqdm

    num_skipped = 0
    num_bytes = sum(path.stat().st_size for path in files)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=Path(args.output_prefix).name) as bar:
        builder = IndexedDatasetBuilder(str(binary), dtype=encoder.dtype)
        for place, ids in encoded(documents(files, bar.update), encoder, args.workers):
            if not isinstance(ids, str):
                builder.add_document(ids, [len(ids)])
            elif args.on_error == "stop":
                raise ValueError(f"{place}: {ids}; {MEND}")
            else:
                num_skipped += 1
                tqdm.write(f"skipped {place}: {ids}", file=sys.stderr)
        if not (lengths := builder.sequence_lengths):
            raise ValueError(f"none of the {num_skipped} document(s) can be used")
        builder.finalize(str(index))
    return f"{len(lengths):,} documents, {sum(lengths):,} tokens; {num_skipped:,} skipped."
