"""Activations go to the memory of the host and come back unchanged."""

import weakref
from contextlib import nullcontext
from threading import get_ident
from unittest.mock import Mock

import pytest
import torch

from megatron.seq1f1b.model.memory import copies, host_blocks
from megatron.seq1f1b.model.memory.host_memory import HostMemory
from megatron.seq1f1b.platform import stand_ins

SIZE = 64  # x 64 x 4 bytes are above the smallest that move


@pytest.fixture
def made():
    """The sizes of the blocks that are made."""
    return []


@pytest.fixture
def memory(monkeypatch, made):
    def new_buffer(size):
        made.append(size)
        return host_blocks.mapped_buffer(size)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return HostMemory(new_buffer=new_buffer)


def test_only_what_nothing_else_refers_to_moves(memory):
    """Views of one storage once; neither parameters and their views, nor what others hold, nor what is small."""
    weight, shared = torch.nn.Parameter(torch.randn(SIZE, SIZE)), torch.randn(SIZE, SIZE)
    x = torch.randn(SIZE, SIZE)

    def forward():
        inner = torch.nn.functional.linear(x, weight).exp()  # saves its output, once for two uses
        output = (inner[: SIZE // 2] * inner[SIZE // 2 :] * shared[: SIZE // 2] * weight.t()[: SIZE // 2]).sum()
        return output * output.tanh(), weakref.ref(inner.untyped_storage())

    with memory.keeping("unit"):
        output, saved = forward()
    memory.offload("unit", nullcontext())
    half = SIZE * SIZE // 2 * 4
    assert memory.num_bytes == 3 * half  # inner, and what is multiplied with the weight
    memory.reload("unit", nullcontext())
    assert memory.num_bytes == 0 and memory.most_bytes == 3 * half
    assert saved() is None
    memory.wait("unit")
    output.backward()
    moved, weight.grad = weight.grad, None
    forward()[0].backward()
    assert torch.equal(moved, weight.grad)
    memory.assert_empty()


def test_a_leaf_that_was_away_gets_its_gradient(memory):
    """As the output of a frozen embedding, of which only the graph of recomputed layers knows."""

    def forward():
        leaf = torch.ones(SIZE, SIZE).requires_grad_()
        return leaf.sin().sum()

    with memory.keeping("unit"):
        output = forward()
    memory.offload("unit", nullcontext())
    assert memory.num_bytes == SIZE * SIZE * 4
    memory.reload("unit", nullcontext())
    memory.wait("unit")
    output.backward()
    memory.assert_empty()


def left(memory, unit, x):
    with memory.keeping(unit):
        return (x.exp() * x.cos()).sum()


def went_away_and_back(memory, xs):
    """A unit for each x is away at once, before its backward."""
    outputs = [left(memory, unit, x) for unit, x in enumerate(xs)]
    for unit in range(len(xs)):
        memory.offload(unit, nullcontext())
    for unit in range(len(xs)):
        memory.reload(unit, nullcontext())
        memory.wait(unit)
    sum(outputs).backward()
    memory.assert_empty()


def test_units_of_unequal_sizes_share_blocks(memory, made):
    for rows in (5, 900, 300, 1100, 40):  # 512 bytes each, kept twice
        xs = [torch.randn(part * rows, 64, dtype=torch.float64, requires_grad=True) for part in (1, 3)]
        went_away_and_back(memory, xs)
        for x in xs:
            assert torch.allclose(x.grad, (x.exp() * (x.cos() - x.sin())).detach())
    assert memory.most_bytes > 2 * host_blocks.BLOCK
    assert sum(made) < memory.most_bytes + 2 * host_blocks.BLOCK


def test_blocks_of_the_host_serve_again(memory, made):
    x = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        went_away_and_back(memory, [x, x])
    abandoned = left(memory, "unit", x)
    memory.offload("unit", nullcontext())
    memory.clear()  # a step that fails leaves its blocks to the next
    assert memory.num_unused_blocks == len(made) == 2
    del abandoned


@pytest.fixture
def kinds(monkeypatch):
    """The kinds of blocks that are made, in order, as on a GPU whose streams have always ended."""
    made = []
    for name in ("pinned_buffer", "pageable_buffer"):
        make = lambda size, name=name: made.append(name) or torch.empty(size, dtype=torch.uint8)  # noqa: E731
        monkeypatch.setattr(host_blocks, name, make)
    for name, new in (("Stream", stand_ins.Stream), ("current_stream", stand_ins.Stream), ("stream", stand_ins.stream)):
        monkeypatch.setattr(torch.cuda, name, new)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cuda")
    return made


def test_nothing_is_pinned_in_a_later_step(kinds):
    """Receives wait then: what it needs is pinned at its end."""
    memory, x = HostMemory(), torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    # Units of the step, blocks made while it runs, and at its end.
    for units, within, at_end in (
        (1, ["pinned_buffer"], []),
        (3, ["pageable_buffer"] * 2, ["pinned_buffer"] * 2),
        (3, [], []),
        (4, ["pageable_buffer"], ["pinned_buffer"]),
    ):
        went_away_and_back(memory, [x] * units)
        assert kinds == within
        memory.clear()
        assert kinds == within + at_end and memory.num_unused_blocks == units
        kinds.clear()
    assert torch.allclose(x.grad, (11 * x.exp() * (x.cos() - x.sin())).detach())


def test_the_link_is_measured(monkeypatch):
    """Copies go each way once all ranks are ready, first as a warm-up."""
    copied = []
    ready = []
    copy_pairs = copies.copy_pairs

    def counting(pairs, *rest):
        copied.extend(pairs)
        return copy_pairs(pairs, *rest)

    monkeypatch.setattr(copies, "copy_pairs", counting)
    monkeypatch.setattr(copies, "_PROBE", 1 << 20)
    assert copies.link_rate(torch.device("cpu"), lambda: ready.append(len(copied))) > 1e6
    assert ready == [0, 2] and len(copied) == 2 + 2 * copies._ROUNDS


def test_what_is_away_cannot_be_read(memory):
    output = left(memory, "unit", torch.randn(SIZE, SIZE, requires_grad=True))
    memory.offload("unit", nullcontext())
    with pytest.raises(RuntimeError, match="read while it is in the memory of the host"):
        output.backward()
    with pytest.raises(AssertionError, match="activations outlived the step: \\['unit'\\]"):
        memory.assert_empty()


def test_a_copy_that_fails_ends_the_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    memory = HostMemory(copy=Mock(side_effect=RuntimeError("the link is down")))
    output = left(memory, "unit", torch.randn(SIZE, SIZE, requires_grad=True))
    memory.offload("unit", nullcontext())
    with pytest.raises(RuntimeError, match="the link is down"):
        memory.reload("unit", nullcontext())
        memory.wait("unit")
    memory.clear()
    memory.assert_empty()
    del output


def test_a_step_after_failed_copies_finds_nothing_of_them(monkeypatch):
    """Neither units of the failed step, nor the errors of its copies, of which here all come back in vain."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    is_down = [True]
    threads = []

    def copy(pairs, after, span):
        threads.append(get_ident())  # first that of copies to the host
        if is_down and threads[-1] != threads[0]:
            raise RuntimeError("the link is down")
        copies.copy_pairs(pairs, after, span)

    memory = HostMemory(copy=copy)
    x = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    outputs = [left(memory, unit, x) for unit in ("first", "second")]
    for move in (memory.offload, memory.reload):
        for unit in ("first", "second"):
            move(unit, nullcontext())
    memory.clear()
    memory.assert_empty()
    assert memory.num_bytes == 0
    outputs.clear()
    is_down.clear()
    went_away_and_back(memory, [x, x])
    assert torch.allclose(x.grad, (2 * x.exp() * (x.cos() - x.sin())).detach())


class Detached(torch.autograd.Function):
    """Saves its input as Megatron's recomputed modules do: detached, to require a gradient again."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(x.detach().requires_grad_())
        kept.extend(ctx.to_save)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.exp(), None


@pytest.mark.parametrize("is_held", [False, True])
def test_a_detached_input_moves_unless_it_is_held(memory, is_held):
    """The graph refers to it, too: it would get a gradient."""
    weight, kept = torch.randn(SIZE, SIZE, requires_grad=True), []
    with memory.keeping("unit"):
        output = Detached.apply(weight * 2, kept).sum()
    if not is_held:
        kept.clear()
    memory.offload("unit", nullcontext())
    assert (memory.num_bytes > 0) != is_held
    memory.reload("unit", nullcontext())
    memory.wait("unit")
    output.backward()
    memory.assert_empty()
    assert torch.allclose(weight.grad, 2 * (2 * weight).exp().detach())


def layered(memory, x, here):
    """The sum of what three layers make of x. `here[n]` has what layer n saves, if that is on the device."""
    for _ in range(3):
        factor = torch.full_like(x, 2.0)
        here.append(weakref.ref(factor.untyped_storage()))
        x = x * factor
        del factor
        memory.end_layer()
    return x.sum()


@pytest.mark.parametrize("layers_leaving", [1, 2])
def test_layers_leave_and_come_back_one_by_one(monkeypatch, layers_leaving):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    memory = HostMemory(layers_leaving)
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    layer = SIZE * SIZE * 4
    here = []
    with memory.keeping("unit"):
        output = layered(memory, x, here)
    assert memory.num_bytes == 3 * layer
    # A layer that ends lets so many leave beside itself; others have left.
    assert [each() is not None for each in here] == [number >= 3 - layers_leaving for number in range(3)]
    memory.offload("unit", nullcontext())
    memory.reload("unit", nullcontext())
    assert memory.num_bytes == 2 * layer
    memory.wait("unit")
    assert memory.num_bytes == layer  # the second comes back beside the backward of the last
    output.backward()
    memory.end_backward("unit")
    assert memory.num_bytes == 0
    assert torch.equal(x.grad, torch.full_like(x, 8.0))
    memory.assert_empty()


def test_layers_that_no_backward_reads_are_forgotten(monkeypatch):
    """As those behind frozen weights, through which no gradient passes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    memory = HostMemory(layers_leaving=1)
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    with memory.keeping("unit"):
        unused = layered(memory, x, [])
        output = layered(memory, x, [])
    memory.offload("unit", nullcontext())
    memory.reload("unit", nullcontext())
    memory.wait("unit")
    output.backward()
    assert memory.num_bytes > 0
    memory.end_backward("unit")
    assert memory.num_bytes == 0
    memory.assert_empty()
    del unused
