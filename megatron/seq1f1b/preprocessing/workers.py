"""Processes that parse and tokenize batches of documents."""

import argparse
import contextlib
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from .documents import BadDocument, Record, parse
from .stopping import Refused, signals_held
from .tokenizer import Tokenizer


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
    encoded = iter(encode([text for text in texts if isinstance(text, str)], tokenizer))
    documents: list[list[int]] = []
    problems: list[tuple[str, str]] = []
    for record, text in zip(batch, texts, strict=True):
        ids = next(encoded) if isinstance(text, str) else text
        if isinstance(ids, BadDocument):
            problems.append((record.place, str(ids)))
            continue
        if args.append_eod:
            ids.append(tokenizer.eod)
        documents.append(ids)
    lengths = [len(document) for document in documents]
    ids_of_all = np.fromiter(chain.from_iterable(documents), dtype, sum(lengths))
    return Result(lengths, ids_of_all, problems, sum(len(record.raw) for record in batch))


def encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int] | BadDocument]:
    """In one call where the tokenizer has one and accepts all texts, else one by one."""
    if tokenizer.encode_batch is not None:
        with contextlib.suppress(Exception):  # one by one, to find the text that it rejects
            documents = tokenizer.encode_batch(texts)
            if all(documents):
                return documents
    return [encode_one(text, tokenizer) for text in texts]


def encode_one(text: str, tokenizer: Tokenizer) -> list[int] | BadDocument:
    try:
        ids = list(tokenizer.encode(text))
    except Exception as error:  # whatever the libraries raise, it belongs to this document
        return BadDocument(f"the tokenizer refused it: {error}")
    if not ids:
        return BadDocument("empty")
    if min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        return BadDocument(f"token id outside the vocabulary of {tokenizer.vocab_size}")
    return ids


class Worker:
    """A process that tokenizes one batch at a time. It ends when its pipe is closed.

    At most one batch is under way, so neither side can block the other by sending. It is forked, and so shares what
    is imported and the tokenizer with its parent and its siblings, in memory and in time.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: type, args: argparse.Namespace, siblings: list["Worker"]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, remote = context.Pipe()
        parents = [self.pipe, *(sibling.pipe for sibling in siblings)]
        self.process = context.Process(target=serve, args=(remote, parents, tokenizer, dtype, args), daemon=True)
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


def serve(
    pipe: Connection, parents: list[Connection], tokenizer: Tokenizer, dtype: type, args: argparse.Namespace
) -> None:
    """A worker. It closes its copies of the parent's ends, so that a dead parent shows as end-of-file."""
    for parent in parents:
        parent.close()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            batch, key = pipe.recv()
            pipe.send(tokenize(batch, tokenizer, dtype, args, key))


@contextlib.contextmanager
def started_workers(tokenizer: Tokenizer, dtype: type, args: argparse.Namespace) -> Iterator[list[Worker]]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    workers: list[Worker] = []
    try:
        for _ in range(args.workers):
            with signals_held():  # in a worker for good: a Ctrl-C reaches all, and the parent is the one to act
                workers.append(Worker(tokenizer, dtype, args, workers))
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
