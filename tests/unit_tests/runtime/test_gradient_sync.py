"""Megatron's hooks are called once per chunk, and `no_sync` is left for nothing but the last backward."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.gradient_sync import GradientSync, gradient_syncs


class Chunk:
    def __init__(self) -> None:
        self.may_reduce = True
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.called = []

    @contextmanager
    def no_sync(self):
        self.may_reduce = False
        yield
        self.may_reduce = True

    def parameters(self):
        return [self.weight]

    def hook(self, parameters) -> None:
        assert self.may_reduce
        self.called.append(list(parameters))


def syncs_of(chunks, ends_last=False, **hooks) -> list[GradientSync]:
    """Megatron passes hooks bare for one chunk, as a list for several."""
    none = dict.fromkeys(("no_sync_func", "grad_sync_func", "param_sync_func"))
    given = {name: made[0] if len(chunks) == 1 else made for name, made in hooks.items()}
    return gradient_syncs(SimpleNamespace(**{**none, **given}), chunks, ends_last)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_hooks_reduce_in_the_last_backward_of_their_chunk(num_chunks):
    chunks = [Chunk() for _ in range(num_chunks)]
    syncs = syncs_of(chunks, no_sync_func=[chunk.no_sync for chunk in chunks])
    assert not any(chunk.may_reduce for chunk in chunks)
    for last, sync in enumerate(syncs):
        for _ in ("input-gradient half", "weight-gradient half"):
            with sync.last_backward():
                assert [chunk.may_reduce for chunk in chunks] == [index == last for index in range(num_chunks)]
            assert not chunks[last].may_reduce
    for sync in syncs:
        sync.close()
    assert all(chunk.may_reduce for chunk in chunks)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_aligned_reduction_is_started_by_one_call_per_chunk(num_chunks):
    chunks = [Chunk() for _ in range(num_chunks)]
    hooks = [chunk.hook for chunk in chunks]
    syncs = syncs_of(chunks, no_sync_func=[chunk.no_sync for chunk in chunks], grad_sync_func=hooks)
    for chunk, sync in zip(chunks, syncs, strict=True):
        with sync.last_backward():
            assert not chunk.may_reduce
        sync.reduce()
    assert [chunk.called for chunk in chunks] == [[[chunk.weight]] for chunk in chunks]


def test_a_rank_that_nobody_waits_for_reduces_by_hooks():
    chunk = Chunk()
    [sync] = syncs_of([chunk], ends_last=True, no_sync_func=[chunk.no_sync], grad_sync_func=[chunk.hook])
    with sync.last_backward():
        assert chunk.may_reduce
    sync.reduce()
    assert chunk.called == []


def test_parameters_are_gathered_where_megatron_asks_for_it():
    chunks = [Chunk(), Chunk()]
    syncs_of(chunks, param_sync_func=[chunk.hook for chunk in chunks])[1].gather()
    assert [len(chunk.called) for chunk in chunks] == [0, 1]
    syncs_of(chunks)[0].gather()
    assert chunks[0].called == []


def test_a_failed_step_leaves_no_chunk_unable_to_reduce():
    chunk = Chunk()
    [sync] = syncs_of([chunk], no_sync_func=[chunk.no_sync])
    with pytest.raises(KeyError), sync.last_backward():
        raise KeyError
    sync.close()
    assert chunk.may_reduce
