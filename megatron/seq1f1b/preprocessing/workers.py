"""Processes that parse and tokenize batches of documents."""

import argparse
import contextlib
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from .documents import BadDocument, Record, parse
from .stopping import STOP_SIGNALS, Refused
from .tokenizer import Tokenizer, load_tokenizer


class Result(NamedTuple):
    """A batch, tokenized: the documents' lengths in tokens, and their ids one after another."""

    lengths: list[int]
    ids: np.ndarray
    problems: list[tuple[str, str]]  # place, reason
    size: int  # bytes read


def tokenize(
    batch: list[Record], tokenizer: Tokenizer, dtype: np.dtype, args: argparse.Namespace, key: str = "text"
) -> Result:
    """The texts under `key`; what cannot be used is among the problems, in the order of the batch."""
    texts: list[str | BadDocument] = []
    for record in batch:
        try:
            texts.append(parse(record, args.input_format, key))
        except BadDocument as bad:
            texts.append(bad)
    encoded = iter(encode_together([text for text in texts if isinstance(text, str)], tokenizer))
    documents: list[np.ndarray] = []
    problems: list[tuple[str, str]] = []
    for record, text in zip(batch, texts, strict=True):
        ids = next(encoded) if isinstance(text, str) else text
        if isinstance(ids, BadDocument):
            problems.append((record.place, str(ids)))
        else:
            documents.append(np.array(ids + [tokenizer.eod] if args.append_eod else ids, dtype))
    return Result(
        [len(document) for document in documents],
        np.concatenate([np.empty(0, dtype), *documents]),
        problems,
        sum(len(record.raw) for record in batch),
    )


def encode_together(texts: list[str], tokenizer: Tokenizer) -> list[list[int] | BadDocument]:
    """Encode in one call where the tokenizer has one and accepts all texts, else one by one."""
    if tokenizer.encode_batch is not None:
        with contextlib.suppress(Exception):  # one by one, to find the text that it rejects
            return [_checked_or_bad(ids, tokenizer) for ids in tokenizer.encode_batch(texts)]
    found: list[list[int] | BadDocument] = []
    for text in texts:
        try:
            ids = list(tokenizer.encode(text))
        except Exception as error:  # whatever the libraries raise, it belongs to this document
            found.append(BadDocument(f"the tokenizer refused it: {error}"))
            continue
        found.append(_checked_or_bad(ids, tokenizer))
    return found


def _checked_or_bad(ids: list[int], tokenizer: Tokenizer) -> list[int] | BadDocument:
    try:
        return checked(ids, tokenizer)
    except BadDocument as bad:
        return bad


def checked(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids, if training can use them; otherwise raises BadDocument."""
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

    def send(self, message: object) -> None:
        with self.watched():
            # Not pipe.send: when that fails on a broken pipe, early releases of Python 3.12 crash
            # on collecting the buffer it leaves in the traceback.
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        with self.watched():
            return self.pipe.recv()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise Refused("A worker died (out of memory?); try fewer --workers.") from None

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, args: argparse.Namespace) -> None:
    """A worker: sends the size of its vocabulary, or why it has none; then tokenizes."""
    for each in STOP_SIGNALS:  # a Ctrl-C at the terminal reaches all; the parent is the one to act
        signal.signal(each, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            tokenizer = load_tokenizer(args)
        except Exception as error:
            pipe.send(
                f"Cannot load the {args.tokenizer_type} (--tokenizer-model, --vocab-file, ...): "
                f"{type(error).__name__}: {error}"
            )
            return
        if args.append_eod and tokenizer.eod not in range(tokenizer.vocab_size):
            pipe.send(
                f"The {args.tokenizer_type} has no end token in its vocabulary: take another "
                "tokenizer, or leave out --append-eod."
            )
            return
        pipe.send(tokenizer.vocab_size)
        dtype = pipe.recv()
        while True:
            batch, key = pipe.recv()
            pipe.send(tokenize(batch, tokenizer, dtype, args, key))


@contextlib.contextmanager
def started_workers(args: argparse.Namespace) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for _ in range(args.workers):
            workers.append(Worker(args))
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def results(batches: Iterable[list[Record]], workers: list[Worker], key: str = "text") -> Iterator[Result]:
    """Tokenize the texts under `key`; results come in the order of the input."""
    busy: deque[Worker] = deque()
    for batch in batches:
        done = None
        if len(busy) < len(workers):
            worker = workers[len(busy)]
        else:
            worker = busy.popleft()
            done = worker.receive()
        worker.send((batch, key))
        busy.append(worker)
        if done is not None:
            yield done
    for worker in busy:
        yield worker.receive()
