#!/usr/bin/env python3
"""Text to tokens: processor time of `seq1f1b preprocess` and of Megatron's own way, side by side.

    python tools/benchmark_preprocessing.py

Megatron's tool calls its tokenizer once a document, in a pool of processes, and hands each document's list of tokens
to its builder. Here that way is put together from Megatron's own tokenizer and builder, and takes turns with ours. Both
start in a process that has everything imported and the tokenizer loaded, and count what they and their workers take
until the pair of files is there, less what they take for the first document alone; the pairs have to be equal.

The documents are Python's standard library, cut at line ends, and the tokenizer is a byte-level BPE trained on it.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron.seq1f1b.commands import preprocess

DOCUMENTS_A_MESSAGE = 32  # in Megatron's tool
FORK = multiprocessing.get_context("fork")


class Encoder:
    """One document a call. The tokenizer is the class's, as in Megatron's tool: the object goes with every task."""

    tokenizer: Any

    def __call__(self, line: str) -> tuple[list[int], int]:
        ids = list(self.tokenizer.tokenize(json.loads(line)["text"]))
        ids.append(self.tokenizer.eod)
        return ids, len(line)


def by_megatron(tokenizer: Any, args: argparse.Namespace) -> None:
    Encoder.tokenizer = tokenizer
    builder = IndexedDatasetBuilder(f"{args.output_prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    with FORK.Pool(args.workers) as pool, open(args.input[0], encoding="utf-8") as lines:
        for ids, _ in pool.imap(Encoder(), lines, DOCUMENTS_A_MESSAGE):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{args.output_prefix}.idx")


def by_us(tokenizer: preprocess.Tokenizer, args: argparse.Namespace) -> None:
    with open(os.devnull, "w") as sys.stdout, open(os.devnull, "w") as sys.stderr:
        preprocess.write_pair(args, "text", args.input, tokenizer)


def processor_seconds(way: Callable[[], None]) -> float:
    """Of a process that goes this way, and of all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = FORK.Process(target=way)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{way} ended with exit code {process.exitcode}.")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_documents(path: Path, length: int, size: int) -> None:
    """About `size` bytes of Python's standard library, in documents of about `length` bytes."""
    with open(path, "w", encoding="utf-8") as file:
        for text in islice(documents(length), max(size // length, 1)):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def documents(length: int) -> Iterator[str]:
    lines: list[str] = []
    held = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        for line in path.read_text("utf-8", errors="replace").splitlines(keepends=True):
            lines.append(line)
            held += len(line)
            if held >= length:
                yield "".join(lines)
                lines, held = [], 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document-bytes", type=int, nargs="+", default=[1000, 16000])
    parser.add_argument("--megabytes", type=float, default=3.0, help="of documents (default: 3)")
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    print(f"{'MB/s of processor time':26}{'Megatron':>10}{'ours':>10}{'ratio':>8}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Path(name, "tokenizer")
        for length in args.document_bytes:
            source = folder / f"{length}.jsonl"
            write_documents(source, length, round(1e6 * args.megabytes))
            flags = ["--input", source, "--tokenizer-model", model, "--append-eod", "--overwrite"]
            flags += ["--workers", args.workers, "--train-tokenizer", args.vocab_size]
            ours, megatrons = (
                preprocess.parse_args([str(word) for word in (*flags, "--output-prefix", folder / which)])
                for which in ("ours", "megatrons")
            )
            if not model.exists():
                preprocess.train_tokenizer(ours, ours.input)
            compare(length, megatrons, ours, args.repeats)


def compare(length: int, megatrons: argparse.Namespace, ours: argparse.Namespace, repeats: int) -> None:
    ways = (
        partial(by_megatron, preprocess.megatrons_tokenizer(megatrons), megatrons),
        partial(by_us, preprocess.load_tokenizer(ours), ours),
    )
    source = Path(ours.input[0])
    everything = source.read_bytes()
    source.write_bytes(everything.splitlines(keepends=True)[0])
    starts = [statistics.median(processor_seconds(way) for _ in range(repeats)) for way in ways]
    source.write_bytes(everything)
    rounds = [[processor_seconds(way) - start for way, start in zip(ways, starts, strict=True)] for _ in range(repeats)]
    for suffix in ("bin", "idx"):
        if not filecmp.cmp(f"{megatrons.output_prefix}.{suffix}", f"{ours.output_prefix}.{suffix}", shallow=False):
            raise SystemExit(f"The .{suffix} files of documents of {length} bytes differ.")
    speeds = [len(everything) / 1e6 / statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
    ratio = statistics.median(megatron / own for megatron, own in rounds)
    print(f"{f'documents of {length} bytes':26}{speeds[0]:10.2f}{speeds[1]:10.2f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
