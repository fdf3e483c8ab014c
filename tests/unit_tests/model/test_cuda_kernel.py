"""The kernels for GPUs without a GPU: their calls fit the operators, and with stand-ins for these the numbers fit too.

scripts/gpu_test.sh tests what the real kernels compute.
"""

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice, Saved, choice, flash, on_parts
from megatron.seq1f1b.model.kernels.adapted import Padded
from megatron.seq1f1b.model.kernels.flash import CudaFlash, FlashAttention4
from megatron.seq1f1b.model.kernels.parts import DocumentsPacked, InCalls
from megatron.seq1f1b.model.kernels.transformer_engine import TransformerEngineFused
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.packed_documents import CumulativeLengths, VisibleDocuments
from support import fake_flash, segments

ROOT = Path(__file__).parents[3]

# Sequences, query heads, KV heads, head size of queries and keys, of values.
HEADS = {
    "64": (1, 2, 2, 64, 64),
    "80, grouped": (2, 4, 2, 80, 80),
    "96": (2, 2, 1, 96, 96),
    "128": (1, 2, 2, 128, 128),
    "latent": (2, 2, 2, 192, 128),
    "odd": (1, 3, 1, 33, 33),
}


def named(operator, args, kwargs):
    """The arguments of a call of a PyTorch operator by the names of its schema."""
    schema = operator.default._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) == len(positional)
    by_name = dict(zip(positional, args, strict=True)) | kwargs
    assert by_name.keys() <= {argument.name for argument in schema.arguments}
    return SimpleNamespace(**by_name)


def torch_operators(monkeypatch):
    """PyTorch's operators: batch first with the lengths of the tensors, or packed with cumulative lengths."""

    def packing(call):
        assert call.is_causal is True
        lengths = call.cum_seq_q, call.cum_seq_k, call.max_q, call.max_k
        if call.query.dim() == 3:
            return lengths
        assert lengths == (None, None, call.query.shape[1], call.key.shape[1])

    def run(call, state):
        assert call.return_debug_mask is False
        call_of = call.query, call.key, call.value
        if lengths := packing(call):
            return fake_flash.forward_packed(*call_of, lengths, call.scale, call.dropout_p, state)
        return fake_flash.forward(*call_of, call.scale, call.dropout_p, state)

    def forward(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_forward, args, kwargs)
        assert call.dropout_p > 0
        state = fake_flash.random_state(call.dropout_p)
        return *run(call, state), state, torch.empty((), dtype=torch.uint64), torch.empty(0)

    def without_dropout(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_forward_no_dropout_inplace, args, kwargs)
        assert call.dropout_p == 0 and call.out.shape == call.query.shape and call.out.stride(-1) == 1
        output, logsumexp = run(call, fake_flash.random_state(0.0))
        call.out.copy_(output)
        return logsumexp

    def backward(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_backward, args, kwargs)
        assert call.unused.shape == () and call.rng_state.shape == (2,)
        # Nothing but dropout reads the random state.
        state = call.rng_state if call.dropout_p else fake_flash.random_state(0.0)
        tensors = call.grad_out, call.query, call.key, call.value, call.out, call.logsumexp
        if lengths := packing(call):
            return fake_flash.backward_packed(*tensors, lengths, call.scale, call.dropout_p, state)
        return fake_flash.backward(*tensors, call.scale, call.dropout_p, state)

    monkeypatch.setattr(flash, "_flash", forward)
    monkeypatch.setattr(flash, "_flash_without_dropout", without_dropout)
    monkeypatch.setattr(flash, "_flash_backward", backward)
    return CudaFlash


def flash_attention_4(monkeypatch):
    """The functions of flash-attn-4, as far as they are used: the names of the arguments are those of 4.0.0b36."""

    def forward(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
        assert return_lse
        # Four values from 4.0.0 beta 19 on.
        return *fake_flash.forward(q, k, v, softmax_scale, 0.0, NO_DROPOUT, causal, one_size=False), None, None

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, deterministic=False):
        assert deterministic is False
        return fake_flash.backward(dout, q, k, v, out, lse, softmax_scale, 0.0, NO_DROPOUT, causal, one_size=False)

    provide(monkeypatch, "flash_attn.cute", "interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    return FlashAttention4


def transformer_engine(monkeypatch):
    """The functions of Transformer Engine 2.20: sequence first, or packed; the log-sum-exp as [..., 1]."""
    layouts = {"sbhd": "causal_bottom_right", "thd": "padding_causal_bottom_right"}

    def check(tensors, call):
        assert call["fused_attention_backend"] == "16 bits" and call["fake_dtype"] == tensors[0].dtype
        assert call["qkv_layout"] == "_".join([call["o_format"]] * 3) and call["window_size"] == (-1, 0)
        assert call["attn_mask_type"] == layouts[call["o_format"]]
        assert all(x.is_contiguous() for x in tensors)
        ends, most = ([call[f"{name}_{of}"] for of in ("q", "kv")] for name in ("cu_seqlens", "max_seqlen"))
        longest = [int(of_kind.diff().max()) for of_kind in ends]
        assert all(of_kind.dtype == torch.int32 for of_kind in ends)
        if call["o_format"] == "thd":
            assert call["cu_seqlens_q_padded"] is ends[0] and call["cu_seqlens_kv_padded"] is ends[1]
            # Bounds that many lengths share, since cuDNN plans for each pair of them.
            assert all(n <= bound < 2 * n and bound.bit_count() == 1 for n, bound in zip(longest, most, strict=True))
            return *ends, *longest
        assert most == longest and call["cu_seqlens_q_padded"] is call["cu_seqlens_kv_padded"] is None
        for x, of_kind, length in zip(tensors, ends, longest, strict=False):
            assert x.shape[0] == length and of_kind.tolist() == [i * length for i in range(x.shape[1] + 1)]

    def forward(*, is_training, q, k, v, attn_scale, dropout, **call):
        assert is_training
        lengths = check((q, k, v), call)
        state = fake_flash.random_state(dropout)
        if lengths:
            output, logsumexp = fake_flash.forward_packed(q, k, v, lengths, attn_scale, dropout, state)
            return output, [logsumexp.t().unsqueeze(-1), state]
        batch_first = (x.transpose(0, 1) for x in (q, k, v))
        output, logsumexp = fake_flash.forward(*batch_first, attn_scale, dropout, state, one_size=False)
        return output.transpose(0, 1).contiguous(), [logsumexp.unsqueeze(-1), state]

    def backward(*, q, k, v, o, d_o, aux_ctx_tensors, attn_scale, dropout, do_format, dqkv_layout, **call):
        assert call.pop("deterministic") is False
        assert do_format == call["o_format"] and dqkv_layout == call["qkv_layout"]
        lengths = check((q, k, v), call)
        assert o.shape == d_o.shape and o.is_contiguous() and d_o.is_contiguous()
        logsumexp, state = aux_ctx_tensors
        logsumexp = logsumexp.squeeze(-1)
        if lengths:
            tensors = d_o, q, k, v, o, logsumexp.t()
            return *fake_flash.backward_packed(*tensors, lengths, attn_scale, dropout, state), None
        batch_first = [x.transpose(0, 1) for x in (d_o, q, k, v, o)]
        grads = fake_flash.backward(*batch_first, logsumexp, attn_scale, dropout, state, one_size=False)
        return *(x.transpose(0, 1) for x in grads), None

    provide(
        monkeypatch,
        "transformer_engine.pytorch.cpp_extensions",
        "fused_attn",
        fused_attn_fwd=forward,
        fused_attn_bwd=backward,
        FusedAttnBackend={"F16_arbitrary_seqlen": "16 bits"},
    )
    return TransformerEngineFused


NO_DROPOUT = torch.zeros(2, dtype=torch.uint64)
RULE = AttentionRule(0.125)
TAKE_TWO_SIZES = (FlashAttention4, TransformerEngineFused)


def provide(monkeypatch, package, module, **functions):
    """A package that can be imported, with one module of these functions."""
    names = package.split(".")
    for i in range(len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[: i + 1]), ModuleType(names[i]))
    content = ModuleType(module)
    for name, function in functions.items():
        setattr(content, name, function)
    monkeypatch.setattr(sys.modules[package], module, content, raising=False)
    monkeypatch.setitem(sys.modules, f"{package}.{module}", content)


KERNELS = {
    "PyTorch": torch_operators,
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
    if heads[3] % 8 or heads[3] != heads[4] and kernel_of not in TAKE_TWO_SIZES:
        results = step(lambda rule: Padded(kernel_of(rule), 8), *tensors)
    else:
        results = step(kernel_of, *tensors)
    for result, expected in zip(results, step(Unfused, *tensors), strict=True):
        assert result.dtype == torch.bfloat16
        # Both compute in more than 16 bits and round once, gradients of earlier segments once per segment.
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 11, 25, 39),), ((0, 12, 13), (0, 30))], ids=str)
@pytest.mark.parametrize("provider", ALL_IN_ONE_CALL.values(), ids=ALL_IN_ONE_CALL)
def test_documents_in_one_call_equal_documents_apart(monkeypatch, provider, documents):
    kernel_of = provider(monkeypatch)
    visible = VisibleDocuments(documents)
    assert isinstance(on_parts(kernel_of(RULE), 0, [(0, 40)], visible), DocumentsPacked)
    assert isinstance(on_parts(Unfused(RULE), 0, [(0, 40)], visible), InCalls)
    tensors = inputs((len(documents), 4, 2, 64, 64))
    apart = step(Unfused, *tensors, documents=documents)
    for result, expected in zip(step(kernel_of, *tensors, documents=documents), apart, strict=True):
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("provider", KERNELS.values(), ids=KERNELS)
def test_what_is_saved_is_the_logsumexp_and_a_random_state(monkeypatch, provider):
    query, key, value, _ = inputs(HEADS["80, grouped"])
    output, statistics = provider(monkeypatch)(RULE).forward(query[30:], key, value)
    assert output.is_contiguous()
    assert sum(x.nbytes for x in statistics) <= 4 * 10 * 2 * 4 + 24


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
    query, key, value, grad = tensors
    torch.manual_seed(3)
    output, _, _, grad_value = step(kernel_of, query, key, value, grad, dropout=0.5)
    assert float((grad_value.double() * value).sum()) == pytest.approx(float((output.double() * grad).sum()), rel=0.02)


@pytest.mark.parametrize("start", [0, 48])
@pytest.mark.parametrize("groups", [4, 2])
def test_calls_fit_the_operators_of_pytorch(start, groups):
    """The real operators, by shapes and types alone."""
    length, batch, heads, size = 16, 2, 4, 64
    query = torch.empty(length, batch, heads, size, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(start + length, batch, groups, size, dtype=torch.bfloat16, device="meta") for _ in "kv")
    kernel = CudaFlash(AttentionRule(0.125, 0.1))
    output, statistics = kernel.forward(query, key, value)
    assert output.shape == query.shape
    grads = kernel.backward(torch.empty_like(output), Saved(query, key, value, output, statistics))
    assert [x.shape for x in grads[:3]] == [query.shape, key.shape, value.shape]


def test_packed_calls_fit_the_operators_of_pytorch():
    query = torch.empty(30, 4, 64, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(50, 2, 64, dtype=torch.bfloat16, device="meta") for _ in "kv")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    packing = CumulativeLengths(ends, ends, 20, 40)
    kernel = CudaFlash(AttentionRule(0.125, 0.1))
    output, statistics = kernel.forward(query, key, value, packing)
    assert output.shape == query.shape
    grads = kernel.backward(output, Saved(query, key, value, output, statistics), packing)
    assert [x.shape for x in grads[:3]] == [query.shape, key.shape, value.shape]


def test_the_stand_in_takes_what_flash_attn_4_takes(monkeypatch):
    real = pytest.importorskip("flash_attn.cute.interface")
    names = ("_flash_attn_fwd", "_flash_attn_bwd")
    parameters = {name: inspect.signature(getattr(real, name)).parameters for name in names}
    flash_attention_4(monkeypatch)
    for name, of_package in parameters.items():
        stand_in = inspect.signature(getattr(sys.modules["flash_attn.cute.interface"], name)).parameters
        assert stand_in.keys() <= of_package.keys()


def test_transformer_engine_gets_its_own_argument_names():
    """By the source of its Python alone, which scripts/setup.sh installs away from other packages."""
    path = ROOT / ".venv/transformer-engine/transformer_engine/pytorch/cpp_extensions/fused_attn.py"
    if not path.is_file():
        pytest.skip("Transformer Engine's Python is not there: run scripts/setup.sh")
    functions = {each.name: each.args for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}
    calls = {}
    kernel = object.__new__(TransformerEngineFused)
    kernel._rule, kernel._ends = RULE, lambda *of: None
    kernel._package = SimpleNamespace(
        FusedAttnBackend={"F16_arbitrary_seqlen": 1},
        fused_attn_fwd=lambda **call: calls.update(fused_attn_fwd=call) or (call["q"], [call["q"]]),
        fused_attn_bwd=lambda **call: calls.update(fused_attn_bwd=call) or (call["q"], call["k"], call["v"]),
    )
    x = torch.zeros(2, 1, 1, 8)
    kernel.backward(x, Saved(x, x, x, *kernel.forward(x, x, x)))
    for name, call in calls.items():
        parameters = [each.arg for each in functions[name].args]
        required = parameters[: len(parameters) - len(functions[name].defaults)]
        assert set(required) <= call.keys() <= set(parameters)


def tensor(size, dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(4, 1, 2, size))


@pytest.mark.parametrize(
    "flags, size, value_size, dtype, is_cuda, dropout, expected",
    [
        ({}, 64, 64, torch.bfloat16, True, 0.0, "CudaFlash"),
        ({}, 80, 80, torch.float16, True, 0.1, "CudaFlash"),
        ({}, 192, 128, torch.bfloat16, True, 0.0, "Padded CudaFlash"),
        ({}, 100, 100, torch.bfloat16, True, 0.0, "Padded CudaFlash"),
        ({}, 320, 320, torch.bfloat16, True, 0.0, "Unfused"),
        ({}, 64, 64, torch.float32, True, 0.0, "Unfused"),
        ({}, 64, 64, torch.float32, False, 0.0, "CpuFlash"),
        ({}, 100, 100, torch.bfloat16, False, 0.0, "CpuFlash"),
        ({}, 192, 128, torch.float32, False, 0.0, "Padded CpuFlash"),
        ({}, 64, 64, torch.float32, False, 0.1, "Unfused"),
        ({"backend": "flash"}, 64, 64, torch.bfloat16, True, 0.0, "CudaFlash"),
        ({"backend": "unfused"}, 64, 64, torch.bfloat16, True, 0.0, "Unfused"),
        ({"backend": "local"}, 64, 64, torch.float32, False, 0.0, "Unfused"),
        ({"flash_attention_version": 2}, 64, 64, torch.bfloat16, True, 0.1, "CudaFlash"),
        ({"flash_attention_version": 4}, 192, 128, torch.bfloat16, True, 0.0, "FlashAttention4"),
        ({"flash_attention_version": 4}, 100, 100, torch.bfloat16, True, 0.0, "Padded FlashAttention4"),
        ({"flash_attention_version": 3}, 64, 64, torch.bfloat16, True, 0.0, "CudaFlash"),
        ({"flash_attention_version": 2}, 64, 64, torch.bfloat16, False, 0.0, "CpuFlash"),
        ({"backend": "fused"}, 64, 64, torch.bfloat16, True, 0.1, "TransformerEngineFused"),
        ({"backend": "fused"}, 192, 128, torch.bfloat16, True, 0.0, "TransformerEngineFused"),
        ({"backend": "fused"}, 100, 100, torch.bfloat16, True, 0.0, "Padded TransformerEngineFused"),
        ({"backend": "fused"}, 64, 64, torch.float32, True, 0.0, "Unfused"),
        ({"backend": "fused"}, 64, 64, torch.float32, False, 0.0, "CpuFlash"),
    ],
)
def test_choice(monkeypatch, flags, size, value_size, dtype, is_cuda, dropout, expected):
    transformer_engine(monkeypatch)
    flash_attention_4(monkeypatch)
    monkeypatch.setattr(choice, "why_not", lambda number: None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    rule, kernels = AttentionRule(0.125, dropout), KernelChoice(**flags, has_dropout=dropout > 0)
    kernel = kernels.kernel(rule, tensor(size, dtype, is_cuda), tensor(value_size, dtype, is_cuda))
    kinds = [type(kernel).__name__]
    if isinstance(kernel, Padded):
        kinds.append(type(kernel.kernel).__name__)
    assert " ".join(kinds) == expected


def test_what_is_not_fused_is_warned_of_once_on_rank_0(monkeypatch, caplog):
    kernels = KernelChoice()
    for _ in range(3):
        kernels.kernel(RULE, tensor(64, torch.float32), tensor(64, torch.float32))
        kernels.kernel(RULE, tensor(320), tensor(320))
    lines = caplog.messages
    assert len(lines) == 2 and "torch.float32 on a GPU" in lines[0] and "more than 256" in lines[1]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    KernelChoice().kernel(RULE, tensor(320), tensor(320))
    assert not caplog.messages


def installed(monkeypatch, folder, modules):
    """Fake packages on the path: those of FlashAttention 3, or of 4, with the source of their module."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, name)
    for name, source in modules.items():
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(folder)


ON_3, ON_4 = {"flash_attn_interface": ""}, {"flash_attn.cute.interface": "_flash_attn_fwd = _flash_attn_bwd = None"}
# flash-attn 2.8.3 ships the folder flash_attn/cute.
WITHOUT_COMPILER = {"flash_attn.cute.interface": "import cutlass_that_is_not_there"}


@pytest.mark.parametrize(
    "version, major, modules, used",
    [
        (None, 8, ON_3 | ON_4, 2),
        (None, 9, ON_3, 3),
        (None, 9, ON_4, 2),
        (None, 10, ON_3 | ON_4, 2),
        (2, 9, ON_3 | ON_4, 2),
        (3, 9, ON_3 | ON_4, 3),
        (4, 9, ON_3 | ON_4, 4),
        (4, 10, ON_4, 4),
        (3, 10, ON_3, "3 cannot be used: it is made for Hopper GPUs; or drop it"),
        (4, 8, ON_4, "4 cannot be used: it is made for Hopper and Blackwell GPUs"),
        (4, 9, {}, "4 cannot be used: install the package flash-attn-4"),
        (4, 10, WITHOUT_COMPILER, r"interface cannot be imported \(No module named 'cutlass_that"),
    ],
)
def test_version_4_only_if_asked_for_else_3_else_2(monkeypatch, tmp_path, version, major, modules, used):
    activated = []
    installed(monkeypatch, tmp_path, modules)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    kernels = KernelChoice(flash_attention_version=version)
    if isinstance(used, str):
        with pytest.raises(ValueError, match=f"--flash-attention-version .*{used}"):
            kernels.kernel(RULE, tensor(64), tensor(64))
        return
    assert kernels.name(RULE, True, torch.bfloat16, 64, 64).split()[0] == f"FlashAttention-{used}"
    for value_size in (64, 32):
        kernel = kernels.kernel(RULE, tensor(64), tensor(value_size))
    assert isinstance(kernel, FlashAttention4) == (used == 4)
    assert activated == (["FA3"] if used == 3 else [])


@pytest.mark.parametrize(
    "modules, hint",
    [
        ({}, "install FlashAttention-3"),
        ({"flash_attn_interface": "raise ImportError('undefined symbol')"}, "cannot be imported (undefined symbol)"),
        (None, "install a PyTorch that can switch to it"),
    ],
    ids=["missing", "for another PyTorch", "with PyTorch 2.6"],
)
def test_hopper_without_version_3_gets_a_hint(monkeypatch, caplog, tmp_path, modules, hint):
    installed(monkeypatch, tmp_path, ON_3 if modules is None else modules)
    if modules is None:
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert isinstance(KernelChoice().kernel(RULE, tensor(64), tensor(64)), CudaFlash)
    (line,) = caplog.messages
    assert "FlashAttention-2 instead of FlashAttention-3" in line and hint in line


def test_dropout_runs_on_version_2(monkeypatch):
    kernels = KernelChoice(has_dropout=True)
    for dropout in (0.0, 0.1):  # evaluation and training
        assert isinstance(kernels.kernel(AttentionRule(0.125, dropout), tensor(64), tensor(64)), CudaFlash)
    with pytest.raises(ValueError, match="--flash-attention-version 3 cannot be used: it has no attention dropout"):
        KernelChoice(flash_attention_version=3, has_dropout=True).kernel(RULE, tensor(64), tensor(64))


def test_pytorch_has_the_implementation_by_this_name():
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()


def test_a_kernel_is_chosen_once(monkeypatch):
    activated = []
    monkeypatch.setattr(choice, "why_not", lambda number: None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    kernels = KernelChoice()
    first = kernels.kernel(RULE, tensor(64), tensor(64))
    assert kernels.kernel(AttentionRule(0.125), tensor(64), tensor(64)) is first
    assert kernels.kernel(AttentionRule(0.25), tensor(64), tensor(64)) is not first
    assert activated == ["FA3"]


def test_documents_are_described_to_the_gpu_once_a_segment(monkeypatch):
    """For all layers, forward and backward."""
    kernel_of = torch_operators(monkeypatch)
    made = []
    monkeypatch.setattr(torch, "tensor", lambda *args, real=torch.tensor, **of: made.append(args) or real(*args, **of))
    tensors, parts = inputs((1, 4, 2, 64, 64)), segments.segments_of(BOUNDS, ((0, 5, 11, 25, 39),))
    for _ in range(3):
        step(kernel_of, *tensors, parts=parts)
    assert len(made) == len(parts)
