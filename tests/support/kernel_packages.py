"""Packages of attention kernels for GPUs on the CPU: their functions check a call and compute it by `fake_flash`."""

import sys
from types import ModuleType, SimpleNamespace

import torch

from megatron.seq1f1b.model.kernels import flash
from megatron.seq1f1b.model.kernels.flash import CudaFlash, FlashAttention4
from megatron.seq1f1b.model.kernels.transformer_engine import TransformerEngineFused
from support import fake_flash

NO_DROPOUT = fake_flash.random_state(0.0)
HAS_FORWARD_WITHOUT_DROPOUT = flash._flash_without_dropout is not None


def provide(monkeypatch, package, module, **functions):
    """A package that can be imported, with one module of these functions."""
    names = package.split(".")
    for i in range(len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[: i + 1]), ModuleType(names[i]))
    content = SimpleNamespace(**functions)
    monkeypatch.setattr(sys.modules[package], module, content, raising=False)
    monkeypatch.setitem(sys.modules, f"{package}.{module}", content)


def named(operator, args, kwargs):
    """The arguments of a call of a PyTorch operator by the names of its schema."""
    names = [argument.name for argument in operator.default._schema.arguments]
    positional = [argument.name for argument in operator.default._schema.arguments if not argument.kwarg_only]
    by_name = dict(zip(positional, args, strict=True)) | kwargs
    assert by_name.keys() <= set(names)
    return SimpleNamespace(**by_name)


def torch_operators(monkeypatch, forward_without_dropout=HAS_FORWARD_WITHOUT_DROPOUT):
    """PyTorch's operators: batch first with the lengths of the tensors, or packed with cumulative lengths. Versions up
    to 2.11 have no `forward_without_dropout`."""

    def packing(call):
        assert call.is_causal is True
        lengths = call.cum_seq_q, call.cum_seq_k, call.max_q, call.max_k
        if call.query.dim() == 3:
            return lengths
        assert lengths == (None, None, call.query.shape[1], call.key.shape[1])
        return ()

    def run(call, state):
        assert call.return_debug_mask is False
        return fake_flash.forward(call.query, call.key, call.value, call.scale, call.dropout_p, state, packing(call))

    def forward(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_forward, args, kwargs)
        assert call.dropout_p > 0 or not forward_without_dropout
        state = fake_flash.random_state(call.dropout_p)
        return *run(call, state), state, torch.empty((), dtype=torch.uint64), torch.empty(0)

    def without_dropout(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_forward_no_dropout_inplace, args, kwargs)
        assert call.dropout_p == 0 and call.out.shape == call.query.shape and call.out.stride(-1) == 1
        output, logsumexp = run(call, NO_DROPOUT)
        call.out.copy_(output)
        return logsumexp

    def backward(*args, **kwargs):
        call = named(torch.ops.aten._flash_attention_backward, args, kwargs)
        assert call.unused.shape == () and call.rng_state.shape == (2,)
        state = call.rng_state if call.dropout_p else NO_DROPOUT  # nothing but dropout reads it
        return fake_flash.backward(
            call.grad_out,
            call.query,
            call.key,
            call.value,
            call.out,
            call.logsumexp,
            call.scale,
            call.dropout_p,
            state,
            packing(call),
        )

    monkeypatch.setattr(flash, "_flash", forward)
    monkeypatch.setattr(flash, "_flash_without_dropout", without_dropout if forward_without_dropout else None)
    monkeypatch.setattr(flash, "_flash_backward", backward)
    return CudaFlash


def older_torch_operators(monkeypatch):
    return torch_operators(monkeypatch, forward_without_dropout=False)


def flash_attention_4(monkeypatch):
    """The functions of flash-attn-4, as far as they are used: the names of the arguments are those of 4.0.0b36."""

    def forward(q, k, v, *, softmax_scale, causal, return_lse):
        assert causal and return_lse
        # Four values from 4.0.0 beta 19 on.
        return *fake_flash.forward(q, k, v, softmax_scale, 0.0, NO_DROPOUT, one_size=False), None, None

    def backward(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic):
        assert causal and deterministic is False
        return fake_flash.backward(dout, q, k, v, out, lse, softmax_scale, 0.0, NO_DROPOUT, one_size=False)

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
        return ()

    def turned(x):
        return x.transpose(0, 1).contiguous() if x.dim() == 4 else x

    def forward(*, is_training, q, k, v, attn_scale, dropout, **call):
        assert is_training
        packing = check((q, k, v), call)
        state = fake_flash.random_state(dropout)
        tensors = map(turned, (q, k, v))
        output, logsumexp = fake_flash.forward(*tensors, attn_scale, dropout, state, packing, one_size=False)
        return turned(output), [logsumexp.unsqueeze(-1), state]

    def backward(*, q, k, v, o, d_o, aux_ctx_tensors, attn_scale, dropout, do_format, dqkv_layout, **call):
        assert call.pop("deterministic") is False
        assert do_format == call["o_format"] and dqkv_layout == call["qkv_layout"]
        packing = check((q, k, v), call)
        logsumexp, state = aux_ctx_tensors
        assert o.shape == d_o.shape and o.is_contiguous() and d_o.is_contiguous()
        gradients = fake_flash.backward(
            *map(turned, (d_o, q, k, v, o)),
            logsumexp.squeeze(-1),
            attn_scale,
            dropout,
            state,
            packing,
            one_size=False,
        )
        return *map(turned, gradients), None

    functions = {"fused_attn_fwd": forward, "fused_attn_bwd": backward}
    backends = {"F16_arbitrary_seqlen": "16 bits"}
    package = "transformer_engine.pytorch.cpp_extensions"
    provide(monkeypatch, package, "fused_attn", **functions, FusedAttnBackend=backends)
    return TransformerEngineFused
