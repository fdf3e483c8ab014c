#!/usr/bin/env python3
"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of
either. Out: one pair, to be named in training as ``--data-path PREFIX``. The tokenizer is any that
Megatron knows, under Megatron's own flags, or a byte-level BPE trained here on the same input:

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The two files appear together, complete, at the very end of a run, or not at all.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np
from tqdm import tqdm

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BATCH_BYTES, BATCH_RECORDS = 1 << 18, 1024
EOD, PAD = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two special tokens
# The classes of transformers that add nothing to tokenizer.json: a tokenizer of such a class is
# read by `tokenizers` itself, which spares every worker the import of Megatron.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Refused(Exception):
    """The run cannot go on; the text is the one sentence that the user reads."""


class BadDocument(Exception):
    """One document cannot be used; the text says why."""


def refusal(place: str, reason: str) -> Refused:
    return Refused(f"{place}: {reason}; mend or remove it, or use --on-error skip.")


# ------------------------------------------------------------------------------ reading the input


class Record(NamedTuple):
    """A document as it lies in its file (``line`` is 0 for a whole file), or why it cannot be read."""

    path: str
    line: int
    raw: bytes
    error: str = ""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


def find_files(inputs: list[str], glob: str, exclude: list[str]) -> list[str]:
    """All input files, folders walked in sorted order; what cannot be read is found out on opening."""
    files: list[str] = []
    for given in inputs:
        if not os.path.exists(given):
            raise Refused(f"--input {given} does not exist.")
        if not os.path.isdir(given):
            files.append(given)
            continue
        for folder, subfolders, names in os.walk(given, onerror=lambda e: files.append(e.filename)):
            wanted = [n for n in subfolders if not any(fnmatch(n, x) for x in exclude)]
            subfolders[:] = sorted(wanted)
            for name in sorted(names):
                path = os.path.join(folder, name)
                # A pipe or socket would block for ever; a broken link is kept, to be reported.
                usable = os.path.isfile(path) or not os.path.exists(path)
                if usable and fnmatch(name, glob) and not any(fnmatch(name, x) for x in exclude):
                    files.append(path)
    if not files:
        raise Refused(f"No file under --input {' '.join(inputs)} matches --glob '{glob}'.")
    return files


def is_json_lines(path: str, input_format: str) -> bool:
    return input_format == "jsonl" or (input_format == "auto" and path.endswith(JSON_SUFFIXES))


def read_records(files: Iterable[str], input_format: str) -> Iterator[Record]:
    """The documents of all files in order, undecoded: decoding and parsing is the workers' job."""
    for path in files:
        try:
            with open(path, "rb") as stream:
                if not is_json_lines(path, input_format):
                    yield Record(path, 0, stream.read())
                    continue
                line = 0
                for line, raw in enumerate(stream, 1):
                    yield Record(path, line, raw)
                if line == 0:
                    yield Record(path, 0, b"")
        except OSError as error:
            yield Record(path, 0, b"", f"unreadable: {error.strerror}")


def parse(record: Record, input_format: str, key: str) -> str:
    """The text of a document. Raises BadDocument."""
    if record.error:
        raise BadDocument(record.error)
    try:
        text = record.raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise BadDocument("empty")
    if not is_json_lines(record.path, input_format):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"bad JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadDocument("not a JSON object")
    if key not in value:
        raise BadDocument(f"no key '{key}' (--json-key)")
    if not isinstance(value[key], str):
        raise BadDocument(f"key '{key}' is not a string")
    if not value[key].strip():
        raise BadDocument("empty")
    return value[key]


def batched(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in batches that are worth a message to a worker and bounded in memory."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------------------- the tokenizer


class Tokenizer(NamedTuple):
    encode: Callable[[str], list[int]]
    vocab_size: int
    eod: int | None


def train_tokenizer(args: argparse.Namespace, files: list[str]) -> None:
    """Train a byte-level BPE on all documents; save it as Megatron's HuggingFaceTokenizer reads it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    def texts() -> Iterator[str]:
        for record in read_records(files, args.input_format):
            try:
                text = parse(record, args.input_format, args.json_key)
            except BadDocument as bad:  # skipped ones are reported when they come to be tokenized
                if args.on_error == "stop":
                    raise refusal(record.place, str(bad)) from None
                continue
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.train_tokenizer,
        special_tokens=[AddedToken(EOD, special=True), AddedToken(PAD, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)

    config = {
        "tokenizer_class": PLAIN_CLASSES[0],
        "eos_token": EOD,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        # Without a limit here transformers warns about every document longer than a guessed one.
        "model_max_length": 1 << 62,
    }
    folder = Path(args.tokenizer_model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
        tokenizer.save(f"{new}/tokenizer.json")
        Path(new, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        with signals_held():
            for name in ("tokenizer_config.json", "tokenizer.json"):
                os.replace(f"{new}/{name}", folder / name)
    print(f"Tokenizer of {tokenizer.get_vocab_size()} tokens saved in {folder}.", flush=True)


def load_tokenizer(args: argparse.Namespace) -> Tokenizer:
    return load_plain_tokenizer(args) or load_megatron_tokenizer(args)


def load_plain_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of a folder that needs nothing but `tokenizers`; None where it needs Megatron."""
    folder = Path(args.tokenizer_model or "")
    if args.tokenizer_type != "HuggingFaceTokenizer" or args.vocab_file or args.special_tokens:
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        eos = config.get("eos_token")
        if config.get("tokenizer_class") not in PLAIN_CLASSES or not isinstance(eos, str):
            return None
        from tokenizers import Tokenizer as Rust

        rust = Rust.from_file(str(folder / "tokenizer.json"))
    except OSError:
        return None
    special = not args.tokenizer_hf_no_include_special_tokens
    return Tokenizer(
        lambda text: rust.encode(text, add_special_tokens=special).ids,
        rust.get_vocab_size(),
        rust.token_to_id(eos),
    )


def load_megatron_tokenizer(args: argparse.Namespace) -> Tokenizer:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # What build_tokenizer reads and preprocessing has no use for.
    unused = dict(pad_vocab_size=False, chat_template=None, null_tokenizer_pad_id=-1)
    megatron = build_tokenizer(argparse.Namespace(**vars(args), **unused))
    try:
        eod = megatron.eod
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        eod = None  # some libraries raise where they have no such token
    return Tokenizer(megatron.tokenize, megatron.vocab_size, eod)


# ------------------------------------------------------------------------------------ the workers


class Result(NamedTuple):
    """A batch, tokenized: the documents' lengths in tokens, and their ids one after another."""

    lengths: list[int]
    ids: np.ndarray
    problems: list[tuple[str, str]]  # place, reason
    size: int  # bytes read


def tokenize(
    batch: list[Record], tokenizer: Tokenizer, dtype: np.dtype, args: argparse.Namespace
) -> Result:
    documents: list[np.ndarray] = []
    problems: list[tuple[str, str]] = []
    for record in batch:
        try:
            ids = encode(parse(record, args.input_format, args.json_key), tokenizer)
        except BadDocument as bad:
            problems.append((record.place, str(bad)))
            continue
        documents.append(np.array(ids + [tokenizer.eod] if args.append_eod else ids, dtype))
    return Result(
        [len(document) for document in documents],
        np.concatenate([np.empty(0, dtype), *documents]),
        problems,
        sum(len(record.raw) for record in batch),
    )


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        ids = list(tokenizer.encode(text))
    except Exception as error:  # whatever the libraries raise, it belongs to this document
        raise BadDocument(f"the tokenizer refused it: {error}") from None
    if not ids:
        raise BadDocument("empty")
    if min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        raise BadDocument(f"token id outside the vocabulary of {tokenizer.vocab_size}")
    return ids


class Worker:
    """A process that tokenizes one batch at a time. It ends when its pipe is closed.

    At most one batch is under way, so neither side can block the other by sending.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote, args), daemon=True)
        self.process.start()
        remote.close()  # so that a dead worker shows as end-of-file

    def receive(self):
        try:
            return self.pipe.recv()
        except EOFError:
            raise Refused("A worker died (out of memory?); try fewer --workers.") from None

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, args: argparse.Namespace) -> None:
    """Body of a worker: first says the size of its vocabulary, or why it has none; then tokenizes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            tokenizer = load_tokenizer(args)
        except Exception as error:
            pipe.send(f"Cannot load the {args.tokenizer_type}: {type(error).__name__}: {error}")
            return
        if args.append_eod and tokenizer.eod is None:
            pipe.send(f"The {args.tokenizer_type} has no end token: leave out --append-eod.")
            return
        pipe.send(tokenizer.vocab_size)
        dtype = pipe.recv()
        while True:
            pipe.send(tokenize(pipe.recv(), tokenizer, dtype, args))


@contextlib.contextmanager
def started_workers(args: argparse.Namespace) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        with signals_held():  # inherited: a Ctrl-C at the terminal is the parent's to handle
            workers.extend(Worker(args) for _ in range(args.workers))
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def results(batches: Iterable[list[Record]], workers: list[Worker]) -> Iterator[Result]:
    """Tokenize the batches; results come in the order of the input."""
    busy: deque[Worker] = deque()
    for batch in batches:
        done = None
        if len(busy) < len(workers):
            worker = workers[len(busy)]
        else:
            worker = busy.popleft()
            done = worker.receive()
        worker.pipe.send(batch)
        busy.append(worker)
        if done is not None:
            yield done
    for worker in busy:
        yield worker.receive()


# ------------------------------------------------------------------------------------- the output


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that would stop the run wait until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def refuse_existing(paths: Iterable[Path], overwrite: bool, flag: str) -> None:
    for path in paths:
        if path.is_dir() or (path.exists() and not overwrite):
            raise Refused(f"{path} exists: choose another {flag}, or add --overwrite.")


@contextlib.contextmanager
def indexed_pair(prefix: str, overwrite: bool, dtype: type):
    """A Megatron builder whose two files take their final names only if the block succeeds."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    target_bin, target_idx = pair_paths(prefix)
    target_bin.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target_bin.parent, prefix=f".{target_bin.stem}-") as new:
        builder = IndexedDatasetBuilder(f"{new}/bin", dtype=dtype)
        try:
            yield builder
            builder.finalize(f"{new}/idx")
        finally:
            builder.data_file.close()
        with signals_held():
            refuse_existing((target_bin, target_idx), overwrite, "--output-prefix")
            # A reader opens the index first: it must never see one that is not its data's.
            target_idx.unlink(missing_ok=True)
            os.replace(f"{new}/bin", target_bin)
            os.replace(f"{new}/idx", target_idx)


def pair_paths(prefix: str) -> tuple[Path, Path]:
    return Path(prefix + ".bin"), Path(prefix + ".idx")


# -------------------------------------------------------------------------------- the command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="PATH",
                       help="files, or folders that are searched with all their subfolders")
    group.add_argument("--input-format", choices=("auto", "jsonl", "text"), default="auto",
                       help="jsonl: a JSON object a line, a document each; text: a document a file; "
                       f"auto (default): jsonl for {' '.join(JSON_SUFFIXES)}, else text")
    group.add_argument("--json-key", default="text", help="key of the text in a JSON object")
    group.add_argument("--glob", default="*", metavar="PATTERN",
                       help="files to take from a folder, by name, such as '*.py'")
    group.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN",
                       help="names of files and subfolders to leave out of a folder")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop",
                       help="at a document that cannot be used (empty, unreadable, not UTF-8, bad "
                       "JSON, key missing): stop and write nothing (default), or report and skip it")

    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="writes PREFIX.bin and PREFIX.idx; PREFIX is training's --data-path")
    group.add_argument("--append-eod", action="store_true",
                       help="end every document with the tokenizer's end token")
    group.add_argument("--overwrite", action="store_true",
                       help="replace an existing pair (and, with --train-tokenizer, tokenizer)")
    group.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                       help="processes that tokenize (default: one for every core)")

    group = parser.add_argument_group("tokenizer", "Megatron's flags, with Megatron's meaning.")
    group.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE",
                       help="first train a byte-level BPE of this size on the input and save it in "
                       "the folder --tokenizer-model")
    group.add_argument("--tokenizer-type", default="HuggingFaceTokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH")
    group.add_argument("--tokenizer-metadata", dest="metadata_path", metavar="FILE")
    group.add_argument("--vocab-file", metavar="FILE")
    group.add_argument("--merge-file", metavar="FILE")
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer and TikTokenizer")
    group.add_argument("--null-tokenizer-eod-id", type=int)
    group.add_argument("--tokenizer-special-tokens", nargs="+", dest="special_tokens")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"))
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    group.add_argument("--tokenizer-sentencepiece-legacy", action="store_true")
    group.add_argument("--tokenizer-sentencepiece-ignore-extra-whitespaces", default=True,
                       action=argparse.BooleanOptionalAction)
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before any work is done."""
    if args.workers < 1:
        raise Refused(f"--workers {args.workers}: at least one is needed.")
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise Refused("NullTokenizer needs --vocab-size.")
    if args.train_tokenizer is not None:
        if args.tokenizer_type != "HuggingFaceTokenizer" or not args.tokenizer_model:
            raise Refused("--train-tokenizer makes a HuggingFaceTokenizer and needs the folder to "
                          "save it in: --tokenizer-model DIR.")
        if args.train_tokenizer < SMALLEST_VOCABULARY:
            raise Refused(f"--train-tokenizer {args.train_tokenizer} is too small: every byte and "
                          f"two special tokens make {SMALLEST_VOCABULARY}.")
        saved = (Path(args.tokenizer_model, "tokenizer.json"),)
        refuse_existing(saved, args.overwrite, "--tokenizer-model (or leave out --train-tokenizer)")
    elif args.tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer",
                                 "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer",
                                 "SFTTokenizer") and not args.tokenizer_model:
        raise Refused(f"{args.tokenizer_type} needs --tokenizer-model; or train one on the input "
                      "with --train-tokenizer VOCAB_SIZE.")
    refuse_existing(pair_paths(args.output_prefix), args.overwrite, "--output-prefix")


def preprocess(args: argparse.Namespace) -> None:
    began = time.monotonic()
    check(args)
    files = find_files(args.input, args.glob, args.exclude)
    total = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    print(f"{len(files)} file(s), {total / 1e6:.1f} MB, {args.workers} worker(s).", flush=True)
    if args.train_tokenizer is not None:
        train_tokenizer(args, files)

    documents = tokens = 0
    skipped: Counter[str] = Counter()
    with started_workers(args) as workers:
        # Megatron takes seconds to import: meanwhile the workers load their tokenizers.
        from megatron.core.datasets.indexed_dataset import DType

        for answer in [worker.receive() for worker in workers]:
            if isinstance(answer, str):
                raise Refused(answer)
        dtype = DType.optimal_dtype(answer)
        for worker in workers:
            worker.pipe.send(dtype)
        with (
            indexed_pair(args.output_prefix, args.overwrite, dtype) as builder,
            tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar,
        ):
            for result in results(batched(read_records(files, args.input_format)), workers):
                for place, reason in result.problems:
                    if args.on_error == "stop":
                        raise refusal(place, reason)
                    tqdm.write(f"skipped {place}: {reason}", file=sys.stderr)
                    skipped[reason.partition(":")[0]] += 1
                start = 0
                for length in result.lengths:
                    builder.add_document(result.ids[start : start + length], [length])
                    start += length
                documents += len(result.lengths)
                tokens += start
                rate = documents / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f}/s, {tokens:,} tokens", False)
                bar.update(result.size)
            if not documents:
                raise Refused(f"None of the {sum(skipped.values())} document(s) can be used.")

    written = sum(path.stat().st_size for path in pair_paths(args.output_prefix))
    print(f"{documents:,} documents, {tokens:,} tokens, {written / 1e6:.1f} MB written, "
          f"{time.monotonic() - began:.1f} s.")
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
        print(f"Skipped {sum(skipped.values())}: {reasons}.")
    print(f"Train on it with --data-path {args.output_prefix}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        preprocess(args)
    except Refused as refused:
        print(f"preprocess_data: error: {refused}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"preprocess_data: error: nothing written: {error}", file=sys.stderr)
        return 1
    return 0


def stop(number: int, _frame: object) -> None:
    """Leave by an exception, so that every context above cleans up behind itself."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    print(f"\npreprocess_data: stopped by {signal.Signals(number).name}, no pair written.",
          file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for each in STOP_SIGNALS:
        signal.signal(each, stop)
    sys.exit(main())
