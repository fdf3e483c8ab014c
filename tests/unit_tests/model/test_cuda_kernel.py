"""The kernels for GPUs without a GPU: their calls fit the operators, and with stand-ins for these the numbers fit too.

scripts/gpu_test.sh tests what the real kernels compute.
"""

import ast
import sys
from pathlib import Path

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, Saved, on_parts
from megatron.seq1f1b.model.kernels.flash import CudaFlash
from megatron.seq1f1b.model.kernels.padded import Padded
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.packed_documents import CumulativeLengths
from support import segments
from support.kernel_packages import flash_attention_4, older_torch_operators, torch_operators, transformer_engine
from support.segments import HEADS

RULE = AttentionRule(0.125)
KERNELS = {
    "PyTorch": torch_operators,
    "PyTorch 2.11": older_torch_operators,
    "flash-attn-4": flash_attention_4,
    "Transformer Engine": transformer_engine,
}
# Those that take dropout, and packed documents in one call.
ALL_IN_ONE_CALL = {name: provider for name, provider in KERNELS.items() if name != "flash-attn-4"}
BOUNDS = [0, 11, 12, 40]


def step(kernel_of, query, key, value, grad, dropout=0.0, documents=None, parts=None):
    """Output and gradients of all segments, through the attention layer."""
    layer = segments.attention(query.shape[3], kernel_of, dropout)
    return segments.run(layer, (query, key, value), grad, parts or segments.segments_of(BOUNDS, documents))


def inputs(heads):
    torch.manual_seed(0)
    return segments.inputs(40, heads, torch.bfloat16)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("provider", KERNELS.values(), ids=KERNELS)
def test_segments_equal_unfused_attention(monkeypatch, provider, heads):
    kernel_of = provider(monkeypatch)
    tensors = inputs(heads)
    is_padded = heads[3] % 8 or (heads[3] != heads[4] and kernel_of is CudaFlash)
    results = step(lambda rule: Padded(kernel_of(rule), 8) if is_padded else kernel_of(rule), *tensors)
    for result, expected in zip(results, step(Unfused, *tensors), strict=True):
        assert result.dtype == torch.bfloat16
        # Both compute in more than 16 bits and round once, gradients of earlier segments once per segment.
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 11, 25, 39),), ((0, 12, 13), (0, 30))], ids=str)
@pytest.mark.parametrize("provider", ALL_IN_ONE_CALL.values(), ids=ALL_IN_ONE_CALL)
def test_documents_in_one_call_equal_documents_apart(monkeypatch, provider, documents):
    kernel_of = provider(monkeypatch)
    (segment,), tensors = segments.segments_of([0, 40], documents), inputs((len(documents), 4, 2, 64, 64))
    kernels = [on_parts(kernel, segment, None, [(0, 40)], tensors[0]) for kernel in (kernel_of(RULE), Unfused(RULE))]
    assert [len(kernel.calls) for kernel in kernels] == [len(documents), sum(map(len, documents))]
    apart = step(Unfused, *tensors, documents=documents)
    for result, expected in zip(step(kernel_of, *tensors, documents=documents), apart, strict=True):
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("provider", ALL_IN_ONE_CALL.values(), ids=ALL_IN_ONE_CALL)
def test_dropout_draws_once_and_the_backward_gets_the_same_state(monkeypatch, provider):
    kernel_of = provider(monkeypatch)
    tensors = inputs(HEADS["80, grouped"])
    torch.manual_seed(3)
    dropped = step(kernel_of, *tensors, dropout=0.5)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(dropped, step(kernel_of, *tensors, dropout=0.5), strict=True))
    assert not torch.equal(dropped[0], step(kernel_of, *tensors, dropout=0.5)[0])
    # Backward with the forward's mask: the output is linear in the values, so their gradient gives it back.
    # For the output itself, as its gradient, that sum is one of squares, so far from zero.
    query, key, value, _ = tensors
    output = dropped[0]
    torch.manual_seed(3)
    *_, grad_value = step(kernel_of, query, key, value, output, dropout=0.5)
    assert float((grad_value.double() * value).sum()) == pytest.approx(float(output.double().square().sum()), rel=0.02)


@pytest.mark.parametrize("shape", [(16, 0, 2, 4), (16, 48, 2, 2), (30, 20, None, 2)], ids=["first", "later", "packed"])
def test_calls_fit_the_operators_of_pytorch(shape):
    """The real operators, by shapes and types alone."""
    length, start, batch, groups = shape

    def empty(*sizes, dtype=torch.bfloat16):
        return torch.empty([size for size in sizes if size is not None], dtype=dtype, device="meta")

    query = empty(length, batch, 4, 64)
    key, value = (empty(start + length, batch, groups, 64) for _ in "kv")
    ends = empty(4, dtype=torch.int32)
    documents = CumulativeLengths(ends, ends, 20, 40) if batch is None else None
    kernel = CudaFlash(AttentionRule(0.125, 0.1))
    output, statistics = kernel.forward(query, key, value, documents)
    assert output.shape == query.shape
    grads = kernel.backward(output, Saved(query, key, value, output, statistics), documents)
    assert [x.shape for x in grads[:3]] == [query.shape, key.shape, value.shape]


def test_transformer_engine_gets_its_own_argument_names(monkeypatch):
    """By the source of its Python alone, which scripts/setup.sh installs away from other packages."""
    package = Path(sys.prefix, "transformer-engine", "transformer_engine")
    path = package / "pytorch/cpp_extensions/fused_attn.py"
    if not path.is_file():
        pytest.skip("Transformer Engine's Python is not there: run scripts/setup.sh")
    functions = {each.name: each.args for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}
    calls = {}
    kernel = transformer_engine(monkeypatch)(RULE)
    kernel._package.fused_attn_fwd = lambda **call: calls.update(fused_attn_fwd=call) or (call["q"], [call["q"]])
    kernel._package.fused_attn_bwd = lambda **call: calls.update(fused_attn_bwd=call) or (None, None, None)
    x = torch.zeros(2, 1, 1, 8)
    kernel.backward(x, Saved(x, x, x, *kernel.forward(x, x, x)))
    for name, call in calls.items():
        parameters = [each.arg for each in functions[name].args]
        required = parameters[: len(parameters) - len(functions[name].defaults)]
        assert set(required) <= call.keys() <= set(parameters)


def test_documents_are_described_to_the_gpu_once_a_segment(monkeypatch):
    """For all layers, forward and backward."""
    kernel_of = torch_operators(monkeypatch)
    made = []
    monkeypatch.setattr(torch, "tensor", lambda *args, real=torch.tensor, **of: made.append(args) or real(*args, **of))
    tensors, parts = inputs((1, 4, 2, 64, 64)), segments.segments_of(BOUNDS, ((0, 5, 11, 25, 39),))
    for _ in range(3):
        step(kernel_of, *tensors, parts=parts)
    assert len(made) == len(parts)
