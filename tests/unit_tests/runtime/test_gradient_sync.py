"""Megatron's hooks are called once per chunk, and `no_sync` is left for nothing but the last backward."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.runtime.gradients.gradient_sync import GradientSync, gradient_syncs


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


def syncs_of(chunks, finishes_last=False, **hooks) -> list[GradientSync]:
    """Megatron passes hooks bare for one chunk, as a list for several."""
    none = dict.fromkeys(("no_sync_func", "grad_sync_func", "param_sync_func"))
    given = {name: made[0] if len(chunks) == 1 else made for name, made in hooks.items()}
    return gradient_syncs(SimpleNamespace(**{**none, **given}), chunks, finishes_last)


@pytest.mark.parametrize(
    "num_chunks, is_aligned, finishes_last",
    [(1, False, False), (2, False, False), (1, True, False), (2, True, False), (1, True, True)],
)
def test_hooks_reduce_in_the_last_backward_or_one_call_does(num_chunks, is_aligned, finishes_last):
    chunks = [Chunk() for _ in range(num_chunks)]
    hooks = {"grad_sync_func": [chunk.hook for chunk in chunks]} if is_aligned else {}
    syncs = syncs_of(chunks, finishes_last, no_sync_func=[chunk.no_sync for chunk in chunks], **hooks)
    by_hooks = finishes_last or not is_aligned
    assert not any(chunk.may_reduce for chunk in chunks)
    for last, sync in enumerate(syncs):
        for _ in ("input-gradient half", "weight-gradient half"):
            with sync.last_backward():
                expected = [index == last and by_hooks for index in range(num_chunks)]
                assert [chunk.may_reduce for chunk in chunks] == expected
            assert not chunks[last].may_reduce
    for sync in syncs:
        sync.reduce()
        sync.close()
    assert all(chunk.may_reduce for chunk in chunks)
    assert [chunk.called for chunk in chunks] == [[] if by_hooks else [[chunk.weight]] for chunk in chunks]


def test_a_failed_step_leaves_no_chunk_unable_to_reduce():
    chunk = Chunk()
    [sync] = syncs_of([chunk], no_sync_func=[chunk.no_sync])
    with pytest.raises(KeyError), sync.last_backward():
        raise KeyError
    sync.close()
    assert chunk.may_reduce
