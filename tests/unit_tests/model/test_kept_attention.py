"""Recomputation repeats masks, and kernels unless attention is kept; gradients are bitwise those without it."""

import gc
import weakref

import pytest
import torch

from megatron.seq1f1b.model.kernels.unfused import Unfused
from support.segments import attention, inputs, of_lengths, run, segments_of

LENGTHS = (20, 3, 17)
DOCUMENTS = ((0, 9, 21), (0, 20))


class Counted(Unfused):
    """Counts its forwards in `calls`, which a test sets to an empty list."""

    def forward(self, *tensors):
        self.calls.append(1)
        return super().forward(*tensors)


def counted_layer(dropout=0.0, keeps=True):
    Counted.calls = []
    layer = attention(8, Counted, dropout)
    layer.segment_context.kept_attention = {} if keeps else None
    return layer


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("lengths", [LENGTHS, (40,)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keeps, runs", [(True, 1), (False, 2)], ids=["kept", "again"])
def test_recomputed_gradients_are_bitwise_equal(keeps, runs, dropout, lengths, documents):
    *tensors, grad = inputs(40, (2, 4, 2, 8, 8))
    segments = of_lengths(lengths, documents)
    results, calls, states = [], [], []
    for recompute in (False, True):
        layer = counted_layer(dropout, keeps)
        torch.manual_seed(5)
        results.append(run(layer, tensors, grad, segments, recompute))
        calls.append(len(Counted.calls))
        states.append(torch.get_rng_state())
    assert calls[1] == runs * calls[0] >= runs * len(segments)
    assert all(map(torch.equal, *results))
    # Later dropout of the layer repeats the masks of the first forward.
    assert torch.equal(*states)


def test_what_is_kept_is_freed_by_the_backward_or_a_failure():
    layer = counted_layer()
    *tensors, grad = inputs(40, (1, 2, 2, 8, 8))
    (segment,) = segments_of([0, 40])
    gc.disable()
    try:
        with layer.segment_context.running(segment, keeps_for_backward=True):
            with torch.no_grad():
                left = weakref.ref(layer(*tensors).untyped_storage())
            output = layer(*(x.requires_grad_() for x in tensors))
            assert output.untyped_storage() is left()
            output.backward(grad)
            del output
            assert left() is None
            layer.segment_context.assert_empty()
            with torch.no_grad():
                layer(*tensors)
    finally:
        gc.enable()
    with pytest.raises(AssertionError, match="1 forwards was kept and not used"):
        layer.segment_context.assert_empty()
    layer.segment_context.clear()
    layer.segment_context.assert_empty()
