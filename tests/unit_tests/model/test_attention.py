"""Memory and kernels of attention by segments."""

import pytest
import torch

from benchmark_host import moved_by_attention
from support.segments import attention, segments_of


def test_saved_bytes_are_those_of_the_unsegmented_sequence():
    """Query, output and log-sum-exp per segment, keys and values once: nothing grows with the number of segments, and
    nothing keeps the projection that they are views of."""
    projected = torch.randn(256, 1, 4, 3 * 16)

    def saved_bytes(k):
        storages = {}

        def note(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        layer, keep = attention(16), []
        context = layer.segment_context
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for segment in segments_of([256 * i // k for i in range(k + 1)]):
                part = projected[segment.start : segment.end].clone().requires_grad_().split(16, dim=-1)
                with context.running(segment, keeps_for_backward=True):
                    keep.append((part, layer(*part)))
        for cache in context._caches.values():
            for rows in cache.rows:
                note(rows._rows)
        return sum(storages.values())

    assert saved_bytes(1) == saved_bytes(2) == saved_bytes(4) == saved_bytes(7) == 256 * (4 * 4 * 16 + 4) * 4


@pytest.mark.parametrize("window", [None, 20])
def test_nothing_is_kept_where_all_weights_below_are_frozen(window):
    """No backward comes to free the cache; the context frees those of other layers in the same way."""
    layer = attention(8, window=window)
    whole = torch.randn(64, 1, 2, 8)
    parts = []
    for segment in segments_of([0, 16, 32, 64]):
        with layer.segment_context.running(segment, keeps_for_backward=True):
            parts.append(layer(*[whole[segment.start : segment.end]] * 3))
    layer.segment_context.assert_empty()
    assert torch.allclose(torch.cat(parts), layer(whole, whole, whole), atol=1e-6)


def test_a_batch_that_was_not_cut_is_an_error():
    query = torch.randn(64, 1, 2, 8)
    layer = attention(8)
    context = layer.segment_context
    running = context.running(segments_of([0, 32, 64])[0], keeps_for_backward=True)
    with running, pytest.raises(AssertionError, match="64 tokens for a segment of 32"):
        layer(query, query, query)


def test_attention_runs_few_kernels_beside_its_own():
    """Two copies forward in every unit; backward two sums over the prefix and two over the segment's own rows, and no
    sum where there is nothing to add to."""
    assert moved_by_attention([64]).kernels == 0
    assert moved_by_attention([16] * 4).kernels == 4 * 2 + (2 + 2 * 2) + 3 * 2
    # Documents that end with their segment leave no gradients for earlier ones, others only in what they have of them.
    assert moved_by_attention([16] * 4, ((0, 16, 32, 48),)).kernels == 4 * 2
    within_two, whole = (moved_by_attention([16] * 4, (starts,)).bytes for starts in ((0, 40), (0,)))
    assert within_two < whole
