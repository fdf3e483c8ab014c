"""Which attention kernel serves a layer, by Megatron's flags, the device, types, sizes and what is installed."""

import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice, kernel_choice
from megatron.seq1f1b.model.kernels.flash import FlashAttention4
from megatron.seq1f1b.model.kernels.padded import Padded
from support.kernel_packages import flash_attention_4, transformer_engine

RULE = AttentionRule(0.125)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tensor(size, dtype=BF16, is_cuda=True):
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(4, 1, 2, size))


@pytest.mark.parametrize(
    "flags, sizes, dtype, device, dropout, expected",
    [
        ({}, (64, 64), BF16, "cuda", 0.0, "CudaFlash"),
        ({}, (80, 80), FP16, "cuda", 0.1, "CudaFlash"),
        ({}, (192, 128), BF16, "cuda", 0.0, "Padded CudaFlash"),
        ({}, (100, 100), BF16, "cuda", 0.0, "Padded CudaFlash"),
        ({}, (320, 320), BF16, "cuda", 0.0, "Unfused"),
        ({}, (64, 64), FP32, "cuda", 0.0, "Unfused"),
        ({}, (64, 64), FP32, "cpu", 0.0, "CpuFlash"),
        ({}, (100, 100), BF16, "cpu", 0.0, "CpuFlash"),
        ({}, (192, 128), FP32, "cpu", 0.0, "Padded CpuFlash"),
        ({}, (64, 64), FP32, "cpu", 0.1, "Unfused"),
        ({"backend": "flash"}, (64, 64), BF16, "cuda", 0.0, "CudaFlash"),
        ({"backend": "unfused"}, (64, 64), BF16, "cuda", 0.0, "Unfused"),
        ({"backend": "local"}, (64, 64), FP32, "cpu", 0.0, "Unfused"),
        ({"flash_attention_version": 4}, (192, 128), BF16, "cuda", 0.0, "FlashAttention4"),
        ({"flash_attention_version": 4}, (100, 100), BF16, "cuda", 0.0, "Padded FlashAttention4"),
        ({"flash_attention_version": 2}, (64, 64), BF16, "cpu", 0.0, "CpuFlash"),
        ({"backend": "fused"}, (64, 64), BF16, "cuda", 0.1, "TransformerEngineFused"),
        ({"backend": "fused"}, (192, 128), BF16, "cuda", 0.0, "TransformerEngineFused"),
        ({"backend": "fused"}, (100, 100), BF16, "cuda", 0.0, "Padded TransformerEngineFused"),
        ({"backend": "fused"}, (64, 64), FP32, "cuda", 0.0, "Unfused"),
        ({"backend": "fused"}, (64, 64), FP32, "cpu", 0.0, "CpuFlash"),
    ],
)
def test_choice(monkeypatch, flags, sizes, dtype, device, dropout, expected):
    transformer_engine(monkeypatch)
    flash_attention_4(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel_choice, "why_not_3", lambda: None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    query, value = (tensor(size, dtype, device == "cuda") for size in sizes)
    kernel = KernelChoice(**flags, has_dropout=dropout > 0).kernel(AttentionRule(0.125, dropout), query, value)
    kinds = [type(kernel).__name__, *([type(kernel.kernel).__name__] if isinstance(kernel, Padded) else [])]
    assert " ".join(kinds) == expected


def test_what_is_not_fused_is_warned_of_once_on_rank_0(monkeypatch, caplog):
    kernels = KernelChoice()
    for _ in range(3):
        kernels.kernel(RULE, tensor(64, torch.float32), tensor(64, torch.float32))
        kernels.kernel(RULE, tensor(320), tensor(320))
    lines = caplog.messages
    assert len(lines) == 2 and "torch.float32 on a GPU" in lines[0] and "more than 256" in lines[1]
    monkeypatch.setenv("RANK", "1")
    KernelChoice().kernel(RULE, tensor(320), tensor(320))
    assert len(caplog.messages) == 2


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
BROKEN_3 = {"flash_attn_interface": "raise ImportError('undefined symbol')"}


@pytest.mark.parametrize(
    "version, major, modules, used",
    [
        (None, 8, ON_3 | ON_4, 2),
        (None, 9, ON_3, 3),
        (None, 9, ON_4, "2 instead of FlashAttention-3: install FlashAttention-3"),
        (None, 9, BROKEN_3, "2 instead of FlashAttention-3: .*its import fails .undefined symbol"),
        (None, 9, "PyTorch 2.6", "2 instead of FlashAttention-3: install a PyTorch that can switch to it"),
        (None, 10, ON_3 | ON_4, 2),
        (2, 9, ON_3 | ON_4, 2),
        (3, 9, ON_3 | ON_4, 3),
        (4, 9, ON_3 | ON_4, 4),
        (4, 10, ON_4, 4),
        (None, 9, "dropout", 2),
    ],
)
def test_version_4_only_by_the_flag_else_3_else_2(monkeypatch, caplog, tmp_path, version, major, modules, used):
    activated, known = [], {*torch.nn.attention.list_flash_attention_impls()}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    if modules == "PyTorch 2.6":
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    installed(monkeypatch, tmp_path, ON_3 | ON_4 if isinstance(modules, str) else modules)
    kernels = KernelChoice(flash_attention_version=version, has_dropout=modules == "dropout")
    warning, used = (used, 2) if isinstance(used, str) else (None, used)
    assert kernels.name(RULE, True, torch.bfloat16, 64, 64).split()[0] == f"FlashAttention-{used}"
    for value_size in (64, 32):
        kernel = kernels.kernel(RULE, tensor(64), tensor(value_size))
    assert isinstance(kernel, FlashAttention4) == (used == 4)
    assert activated == (["FA3"] if used == 3 else []) and {*activated} <= known
    assert len(caplog.messages) == (warning is not None)
    assert warning is None or re.search(f"FlashAttention-{warning}", caplog.text)


def test_version_3_refuses_dropout_before_it_is_activated(monkeypatch):
    """PyTorch's operators would refuse it in the first step."""
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", Mock(side_effect=AssertionError))
    kernels = KernelChoice(flash_attention_version=3, has_dropout=True)
    rule = AttentionRule(0.1, dropout=0.1)
    with pytest.raises(ValueError, match="--flash-attention-version 3 has no attention dropout"):
        kernels.name(rule, True, torch.bfloat16, 64, 64)
    with pytest.raises(ValueError, match="--flash-attention-version 3 has no attention dropout"):
        kernels.kernel(rule, tensor(64), tensor(64))


def test_version_4_refuses_dropout_that_it_would_leave_out(monkeypatch):
    flash_attention_4(monkeypatch)
    with pytest.raises(ValueError, match="--flash-attention-version 4 has no attention dropout"):
        KernelChoice("auto", 4, has_dropout=True).kernel(AttentionRule(0.1, dropout=0.1), tensor(64), tensor(64))
