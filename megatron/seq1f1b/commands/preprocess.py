"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of
either. Out: one pair, to be named in training as ``--data-path PREFIX``. The tokenizer is any of
Megatron's, chosen by Megatron's own flags, or a byte-level BPE trained here on the same input:

    seq1f1b preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The two files appear together, complete, at the very end of a run, or not at all. With --partitions
a run that was killed goes on where it stopped.
"""

import argparse
import os
import signal
import sys
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..preprocessing.documents import (
    JSON_SUFFIXES,
    batched,
    find_files,
    read_records,
    refusal,
)
from ..preprocessing.pair import indexed_pair, pair_paths, recover
from ..preprocessing.partitions import Partitions, numbered
from ..preprocessing.progress import Counts, Progress
from ..preprocessing.stopping import STOP_SIGNALS, Refused, refuse_existing, stop
from ..preprocessing.tokenizer import SMALLEST_VOCABULARY, load_tokenizer, train_tokenizer
from ..preprocessing.workers import Result, Worker, results, started_workers
from .parsing import Parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    _add_input(parser)
    _add_output(parser)
    _add_tokenizer(parser)
    return parser.parse_args(argv)


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, or folders that are searched with all their subfolders",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="jsonl: a JSON object a line, a document each; text: a document a file; "
        f"auto (default): jsonl for {' '.join(JSON_SUFFIXES)}, else text",
    )
    group.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the texts in a JSON object, a pair each: PREFIX_KEY_document (default: text, in PREFIX)",
    )
    group.add_argument("--max-documents", type=int, metavar="N", help="stop after the first N documents of the input")
    group.add_argument(
        "--glob",
        default="*",
        metavar="PATTERN",
        help="files to take from a folder, by name, such as '*.py'",
    )
    group.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="names of files and subfolders to leave out of a folder",
    )
    group.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a document that cannot be used (empty, unreadable, not UTF-8, bad "
        "JSON, key missing): stop and write nothing (default), or report and skip it",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin and PREFIX.idx; PREFIX is training's --data-path",
    )
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the tokenizer's end token",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing pair (and, with --train-tokenizer, tokenizer)",
    )
    group.add_argument(
        "--upstream-names",
        action="store_true",
        help="write PREFIX_text_document.bin and .idx, as Megatron's own tool names them",
    )
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="work through the input in N parts; those that are done stay when the run is killed, and the same command "
        "goes on with the next. The pair is the same (default: 1)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="processes that tokenize (default: one for every core)",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer", "Megatron's flags, with Megatron's meaning.")
    group.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="first train a byte-level BPE of this size on the input and save it in the folder --tokenizer-model",
    )
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
    group.add_argument(
        "--tokenizer-sentencepiece-ignore-extra-whitespaces",
        default=True,
        action=argparse.BooleanOptionalAction,
    )
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before any work is done."""
    if args.workers < 1:
        raise Refused(f"--workers {args.workers}: at least one is needed.")
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise Refused("NullTokenizer needs --vocab-size.")
    if args.train_tokenizer is not None:
        if args.tokenizer_type != "HuggingFaceTokenizer" or not args.tokenizer_model:
            raise Refused(
                "--train-tokenizer makes a HuggingFaceTokenizer and needs the folder to "
                "save it in: --tokenizer-model DIR."
            )
        if args.train_tokenizer < SMALLEST_VOCABULARY:
            raise Refused(
                f"--train-tokenizer {args.train_tokenizer} is too small: every byte and "
                f"two special tokens make {SMALLEST_VOCABULARY}."
            )
        saved = (Path(args.tokenizer_model, "tokenizer.json"),)
        refuse_existing(saved, args.overwrite, "--tokenizer-model (or leave out --train-tokenizer)")
    elif args.tokenizer_type == "HuggingFaceTokenizer" and not args.tokenizer_model:
        raise Refused(
            "Name a tokenizer's folder with --tokenizer-model DIR; to train one on the input, add "
            "--train-tokenizer VOCAB_SIZE."
        )
    for name in ("partitions", "max_documents"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)}: at least one is needed.")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise Refused(f"--json-keys {' '.join(args.json_keys)} names a key twice.")
    for key in args.json_keys:
        prefix = output_prefix(args, key)
        recover(prefix)
        refuse_existing(pair_paths(prefix), args.overwrite, "--output-prefix")


def preprocess(args: argparse.Namespace) -> None:
    check(args)
    files = find_files(args.input, args.glob, args.exclude)
    total = sum(os.path.getsize(path) for path in files if os.path.isfile(path))
    print(f"{len(files)} file(s), {total / 1e6:.1f} MB, {args.workers} worker(s).", flush=True)
    if args.train_tokenizer is not None:
        train_tokenizer(args, files)

    from megatron.core.datasets.indexed_dataset import DType

    tokenizer = load_tokenizer(args)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    with started_workers(tokenizer, dtype, args) as workers:
        for key in args.json_keys:
            began = time.monotonic()
            prefix = output_prefix(args, key)
            counts = write_pair(args, key, prefix, workers, dtype, files, total)
            written = sum(path.stat().st_size for path in pair_paths(prefix))
            print(
                f"{counts.documents:,} documents, {counts.tokens:,} tokens, {written / 1e6:.1f} MB written, "
                f"{time.monotonic() - began:.1f} s."
            )
            if counts.skipped:
                reasons = ", ".join(f"{count} {reason}" for reason, count in counts.skipped.most_common())
                print(f"Skipped {sum(counts.skipped.values())}: {reasons}.")
            print(f"Train on it with --data-path {prefix}", flush=True)


def output_prefix(args: argparse.Namespace, key: str) -> str:
    """Of the pair of a key: with several keys, and on request, named as upstream's tool names it."""
    return (
        f"{args.output_prefix}_{key}_document" if args.upstream_names or len(args.json_keys) > 1 else args.output_prefix
    )


def write_pair(
    args: argparse.Namespace,
    key: str,
    prefix: str,
    workers: list[Worker],
    dtype: type,
    files: list[str],
    total: int,
) -> Counts:
    """Tokenize the texts under a key into the pair at `prefix`, partition by partition if there are several."""
    counts, progress = Counts(), Progress(total)
    records = islice(read_records(files, args.input_format), args.max_documents)
    with progress, indexed_pair(prefix, args.overwrite, dtype) as builder:
        if args.partitions == 1:
            for result in results(batched(records), workers, key):
                add(result, builder, counts, progress, args.on_error)
        else:
            with Partitions(prefix, settings_of(args, key, files), dtype) as parts:
                for number, part in numbered(records, total, args.partitions):
                    if parts.has(number):
                        progress.update(sum(len(record.raw) for record in part), counts)
                        continue
                    with parts.builder(number) as own:
                        partial = Counts()
                        for result in results(batched(part), workers, key):
                            add(result, own, partial, progress, args.on_error)
                    parts.finish(number, partial)
                for partial in parts.merge_into(builder):
                    counts.add(partial)
        if not counts.documents:
            raise Refused(f"None of the {sum(counts.skipped.values())} document(s) can be used.")
    return counts


def add(result: Result, builder: Any, counts: Counts, progress: Progress, on_error: str) -> None:
    """Write the documents of a batch."""
    for place, reason in result.problems:
        if on_error == "stop":
            raise refusal(place, reason)
        tqdm.write(f"skipped {place}: {reason}", file=sys.stderr)
        counts.skipped[reason.partition(":")[0]] += 1
    start = 0
    for length in result.lengths:
        builder.add_document(result.ids[start : start + length], [length])
        start += length
    counts.documents += len(result.lengths)
    counts.tokens += start
    progress.update(result.size, counts)


def settings_of(args: argparse.Namespace, key: str, files: list[str]) -> dict[str, Any]:
    """What partitions of an earlier run have to agree in to be used again."""
    changeable = {"workers", "overwrite", "json_keys", "upstream_names", "input"}
    settings = {name: value for name, value in vars(args).items() if name not in changeable}
    stamps = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files if os.path.isfile(path)]
    return {"key": key, "files": [list(stamp) for stamp in stamps], **settings}


def main(argv: list[str] | None = None) -> int:
    """The program: `run` in a process of its own, which signals stop."""
    # Megatron warns of parts it does not find and that preprocessing never uses.
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # for the workers
    for each in STOP_SIGNALS:
        signal.signal(each, stop)
    return run(argv)


def run(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        preprocess(args)
    except Refused as refused:
        print(f"preprocess_data: error: {refused}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"preprocess_data: error: nothing written: {error}", file=sys.stderr)
        return 2
    return 0
