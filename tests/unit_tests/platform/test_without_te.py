"""Megatron where neither Transformer Engine nor apex is installed, on a machine with a GPU, too.

Training on a CPU has the other repairs: equality with sequence parallelism that of norms, checkpoints those of Adam.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron.seq1f1b.platform import without_te
from megatron.seq1f1b.process.patches import patched


def fused_linear(**options):
    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    config.use_cpu_initialization = True
    options |= {"init_method": torch.nn.init.ones_, "tp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0)}
    return layers.ColumnParallelLinear(4, 6, config=config, bias=False, **options)


def test_an_output_layer_without_apex_is_trained_by_autograd(monkeypatch):
    """Its gradient accumulation is not fused; other layers of Megatron still need the extension."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        fused_linear()
    with patched(without_te.OUTPUT_LAYER):
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            fused_linear(tp_comm_buffer_name="qkv")
        layer = fused_linear()
    assert layer.config.gradient_accumulation_fusion  # which the layers around it keep
    tokens = torch.arange(20.0).view(5, 1, 4)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer(tokens)[0].sum().backward()
    assert torch.equal(layer.weight.grad, tokens.sum((0, 1)).expand(6, 4))
    assert not layer.weight.main_grad.any()  # the hook of DDP adds the gradient once


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_around_one(normalization):
    """--apply-layernorm-1p, which Megatron's local norms refuse: weights start at 0, and 1 is added to them."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        normalization=normalization,
        layernorm_zero_centered_gamma=True,
        sequence_parallel=True,
        tensor_model_parallel_size=2,
    )
    with patched(without_te.LOCAL_LAYERS):
        around_one = WrappedTorchNorm(config, 8, eps=1e-3)
        config.layernorm_zero_centered_gamma = False
        usual = WrappedTorchNorm(config, 8, eps=1e-3)
    assert all(parameter.sequence_parallel for parameter in around_one.parameters())
    assert dict(around_one.named_parameters()).keys() == dict(usual.named_parameters()).keys()
    tokens = torch.randn(5, 2, 8)
    assert torch.equal(around_one(tokens), usual(tokens))
    for norm in (around_one, usual):
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        usual.weight += 1
    assert torch.equal(around_one(tokens), usual(tokens))
