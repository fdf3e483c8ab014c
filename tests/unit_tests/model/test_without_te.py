"""Megatron where neither Transformer Engine nor apex is installed, on a machine with a GPU, too."""

from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model import without_te
from megatron.seq1f1b.process.patches import owner_of, patched


@pytest.fixture
def repaired():
    with patched(without_te.LOCAL_LAYERS + without_te.TORCH_ADAM):
        yield


def test_an_optimizer_without_a_step_has_a_state_to_load_into(repaired):
    """Megatron reads it before it loads a checkpoint."""
    optimizer, _ = owner_of("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict")
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    state = optimizer.state_dict(SimpleNamespace(optimizer=adam, grad_scaler=None))
    assert [group["step"] for group in state["optimizer"]["param_groups"]] == [0.0]
    assert not adam.state


def test_a_norm_is_marked_for_sequence_parallelism(repaired):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    norm = WrappedTorchNorm(config, 8)
    assert all(parameter.sequence_parallel for parameter in norm.parameters()) and config.sequence_parallel


def fused_linear(**options):
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import layers

    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    config.use_cpu_initialization = True
    options |= {"init_method": torch.nn.init.ones_, "tp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0)}
    return layers.ColumnParallelLinear(4, 6, config=config, bias=False, **options)


def test_an_output_layer_without_apex_is_trained_by_autograd(monkeypatch):
    """Its gradient accumulation is not fused; other layers of Megatron still need the extension."""
    monkeypatch.setattr("megatron.core.tensor_parallel.layers._grad_accum_fusion_available", False)
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
