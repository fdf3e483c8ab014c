"""Processes that turn documents into token ids, beside the one that reads and writes.

Tested in commands/test_preprocess.py.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import batched, chain

import numpy as np

from ..process.child_processes import end_with_parent
from .corpus_documents import Document
from .document_encoder import Encoder

_BATCH = 64  # documents: worth a message to a worker
_AHEAD = 4  # batches of each worker that are read while those before are written; bounds memory
_ENDING = (signal.SIGINT, signal.SIGTERM)


def encoded(source: Iterable[Document], encoder: Encoder, num_workers: int) -> Iterator[tuple[str, np.ndarray | str]]:
    """The place of each document, in order, and its ids or what is wrong with it, made by worker processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Forks share imports and the tokenizer with this process, which saves memory and time.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork"), _start_worker, (encoder,))
    next_ones: Iterable[list] = ()
    try:
        _start(pool)
        rounds = batched(batched(source, _BATCH), _AHEAD * num_workers)
        # While the results of a round are written, workers are at the next; nothing follows the last.
        for batches in chain(rounds, [()]):
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
