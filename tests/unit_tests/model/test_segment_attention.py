"""Attention by segments: what one softmax computes, with windows, sinks and documents, and what it keeps meanwhile."""

import gc
import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from benchmark_host import moved_by_attention
from megatron.seq1f1b.model.kernels import KernelChoice
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.memory import storages
from support.segments import Attended, attention, expected, inputs, of_lengths, run, segments_of

LENGTH, BATCH, HEADS, GROUPS, SIZE = 150, 2, 4, 2, 8
CUTS = [(150,), (100, 30, 20), (60, 3, 2, 5, 80)]
DOCUMENTS = {
    "whole": None,
    "documents": ((0, 20, 97), (0, 64)),
    "of one token": ((0, 1, 2, 99, 100, 101, 149), (0, 148, 149)),
    "one sequence": ((0, 20, 22, 62, 97),),
    "at a segment start": ((0, 60, 63, 100, 130), (0, 65)),
    "every token": (tuple(range(LENGTH)), (0,)),
}


def sinks():
    return torch.nn.Parameter(torch.linspace(-1, 2, HEADS, dtype=torch.float64))


@cache
def whole(window, has_sink, documents):
    """Query, key, value and the gradient of the output; and what one softmax makes of them, however they are cut."""
    torch.manual_seed(1)
    batch = len(documents) if documents else BATCH
    tensors, sink = inputs(LENGTH, (batch, HEADS, GROUPS, SIZE, SIZE)), sinks() if has_sink else None
    references = expected(*tensors, window=window, sink=sink, documents=documents)
    return tensors, [*references, sink.grad] if has_sink else references


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("has_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("window", [None, 0, 7, 50])
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_segments_equal_one_softmax(lengths, window, has_sink, documents, backend):
    (*tensors, grad), references = whole(window, has_sink, documents)
    sink = sinks() if has_sink else None
    layer = attention(SIZE, window=window, sink=sink, kernels=KernelChoice(backend))
    results = run(layer, tensors, grad, of_lengths(lengths, documents))
    if has_sink:
        results.append(sink.grad)

    for result, reference in zip(results, references, strict=True):
        # A query that sees one key has no gradient, so errors are relative to the inputs, which are about 1.
        assert (result - reference).abs().max() <= 1e-13 * reference.abs().max().clamp(min=1)


WINDOW, OF_TOKEN = 16, 2 * 2 * SIZE * 4  # bytes of keys and values in fp32


def kept_tokens(context):
    """Tokens whose keys and values layers keep, by the bytes of their storages."""
    tensors = [x for cache in context.all_carried() for rows in cache.rows for x in rows._kept.values()]
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()) / OF_TOKEN


def attended(ends, documents=None, window=WINDOW):
    """One sequence through a layer with a window."""
    *tensors, grad = inputs(LENGTH, (1, 2, 2, SIZE, SIZE), torch.float32)
    return Attended(attention(SIZE, window=window), tensors, grad, segments_of([0, *ends], documents))


@pytest.mark.parametrize("documents", [None, ((0, 20, 97),)], ids=["whole", "documents"])
def test_segments_in_flight_are_kept_and_gradients_of_a_window(documents):
    sequence = attended([50, 60, 80, LENGTH], documents)
    context, outputs = sequence.layer.segment_context, []
    for segment, part in zip(sequence.segments, sequence.parts, strict=True):
        outputs.append(sequence._call(segment, *part))
        assert kept_tokens(context) == segment.end
    for segment in reversed(sequence.segments):
        outputs.pop().sum().backward()
        assert kept_tokens(context) == segment.start
        for kept in context.all_carried():
            assert [x._sum.untyped_storage().nbytes() for x in kept.rows] == [WINDOW * OF_TOKEN / 2] * 2
    context.assert_empty()


def test_evaluation_keeps_one_window():
    sequence = attended([10, 50, 60, 80, LENGTH])
    context, kept = sequence.layer.segment_context, []
    for segment, part in zip(sequence.segments, sequence.parts, strict=True):
        with context.running(segment, keeps_for_backward=False), torch.no_grad():
            sequence.layer(*part)
        kept.append(kept_tokens(context))
    assert kept == [10, WINDOW, WINDOW, WINDOW, 0]


@pytest.mark.parametrize("window", [None, 20])
def test_nothing_is_kept_where_all_weights_below_are_frozen(window):
    """No backward comes to free the cache; the context frees those of other layers in the same way."""
    sequence = attended([16, 32, LENGTH], window=window)
    parts = [[x.detach() for x in part] for part in sequence.parts]
    outputs = [sequence._call(segment, *part) for segment, part in zip(sequence.segments, parts, strict=True)]
    sequence.layer.segment_context.assert_empty()
    expected_output = sequence.layer(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))
    assert torch.allclose(torch.cat(outputs), expected_output, atol=1e-6)


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
        for cached in context.all_carried():
            for rows in cached.rows:
                note(rows._rows)
        return sum(storages.values())

    assert saved_bytes(1) == saved_bytes(2) == saved_bytes(4) == saved_bytes(7) == 256 * (4 * 4 * 16 + 4) * 4


def test_a_batch_of_another_shape_is_an_error():
    for segment, length, message in (
        (segments_of([0, 32, 64])[0], 64, "64 tokens for a segment of 32"),
        (segments_of([0, 8], ((0,), (0, 3)))[0], 8, "1 sequences for a micro-batch of 2.*--micro-batch-size 1"),
    ):
        query, layer = torch.randn(length, 1, 2, 8), attention(8)
        running = layer.segment_context.running(segment, keeps_for_backward=True)
        with running, pytest.raises(AssertionError, match=message):
            layer(query, query, query)


def test_attention_runs_few_kernels_beside_its_own():
    """Two copies forward in every unit; backward two sums over the prefix and two over the segment's own rows, and no
    sum where there is nothing to add to."""
    assert moved_by_attention([64]).kernels == 0
    assert moved_by_attention([16] * 4).kernels == 4 * 2 + (2 + 2 * 2) + 3 * 2
    # Documents that end with their segment leave no gradients for earlier ones, others only in what they have of them.
    assert moved_by_attention([16] * 4, ((0, 16, 32, 48),)).kernels == 4 * 2
    within_two, of_all = (moved_by_attention([16] * 4, (starts,)).bytes for starts in ((0, 40), (0,)))
    assert within_two < of_all


@pytest.mark.parametrize("documents", [None, ((0, 9, 21), (0, 20))], ids=["whole", "documents"])
@pytest.mark.parametrize("lengths", [(20, 3, 17), (40,)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keeps, runs", [(True, 1), (False, 2)], ids=["kept", "again"])
def test_recomputed_gradients_are_bitwise_equal(monkeypatch, keeps, runs, dropout, lengths, documents):
    """Recomputation repeats masks, and kernels unless attention is kept."""
    *tensors, grad = inputs(40, (2, 4, 2, 8, 8))
    segments, forward = of_lengths(lengths, documents), Unfused.forward
    results, calls, states = [], [], []
    monkeypatch.setattr(Unfused, "forward", lambda *given: calls.append(recompute) or forward(*given))
    for recompute in (False, True):
        layer = attention(8, Unfused, dropout)
        layer.segment_context.kept_attention = {} if keeps else None
        torch.manual_seed(5)
        results.append(run(layer, tensors, grad, segments, recompute))
        states.append(torch.get_rng_state())
    assert calls.count(True) == runs * calls.count(False) >= runs * len(segments)
    assert all(map(torch.equal, *results))
    # Later dropout of the layer repeats the masks of the first forward.
    assert torch.equal(*states)


def test_what_is_kept_is_freed_by_the_backward_or_a_failure():
    layer = attention(8)
    context = layer.segment_context
    context.kept_attention = {}
    *tensors, grad = inputs(40, (1, 2, 2, 8, 8))
    (segment,) = segments_of([0, 40])
    gc.disable()
    try:
        with context.running(segment, keeps_for_backward=True):
            with torch.no_grad():
                left = weakref.ref(layer(*tensors).untyped_storage())
            output = layer(*(x.requires_grad_() for x in tensors))
            assert output.untyped_storage() is left()
            output.backward(grad)
            del output
            assert left() is None
            context.assert_empty()
            with torch.no_grad():
                layer(*tensors)
    finally:
        gc.enable()
    with pytest.raises(AssertionError, match="1 forwards was kept and not used"):
        context.assert_empty()
    context.clear()
    context.assert_empty()


# Tokens that are kept: all, or, where they are computed again, a window of each segment.
@pytest.mark.parametrize(
    "window, kept, value_size",
    [(None, (150, 150), SIZE), (20, (150, 60), SIZE), (None, (150, 150), SIZE // 2)],
    ids=["prefix", "window", "values beside keys"],
)
@pytest.mark.parametrize("recompute, keeps", [(False, False), (True, False), (True, True)], ids=["", "again", "kept"])
def test_a_cache_leaves_and_comes_back(monkeypatch, window, kept, value_size, recompute, keeps):
    """Caches, and kept attention, go to the memory of the host with the unit of the last segment."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(storages, "SMALLEST", 1)
    *tensors, grad = inputs(LENGTH, (BATCH, HEADS, GROUPS, SIZE, value_size))
    layer, segments = attention(SIZE, window=window), of_lengths((60, 40, 50))
    usual, sequence = run(layer, tensors, grad, segments), Attended(layer, tensors, grad, segments, recompute)
    layer.segment_context.kept_attention = {} if keeps else None
    memory = layer.segment_context.host_memory
    with memory.keeping("unit"):
        sequence.forward()
    memory.offload("unit", nullcontext())
    of_token, log_sum_exp = BATCH * GROUPS * (SIZE + value_size) * 8, BATCH * HEADS * 8  # bytes, in fp64
    of_kernels = 0 if recompute and not keeps else log_sum_exp * LENGTH
    assert memory.num_bytes == of_token * kept[recompute] + of_kernels
    memory.reload("unit", nullcontext())
    memory.wait("unit")
    sequence.backward()
    grads = (torch.cat([part[i].grad for part in sequence.parts]) for i in range(3))
    assert all(map(torch.equal, usual, [torch.cat(sequence.outputs), *grads]))
