"""Transformer Engine's models need an output layer that is built without NVIDIA apex."""

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import layers

from megatron.seq1f1b.model.output_layer import without_apex

TOKENS, HIDDEN, VOCABULARY = 5, 4, 6


class Alone:
    """A tensor-parallel group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.fixture
def extension_missing(monkeypatch):
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    column = layers.ColumnParallelLinear
    monkeypatch.setattr(column, "__init__", without_apex(column.__init__))


def linear(**options) -> tuple[layers.ColumnParallelLinear, ModelParallelConfig]:
    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    config.use_cpu_initialization = True
    layer = layers.ColumnParallelLinear(
        HIDDEN, VOCABULARY, config=config, init_method=torch.nn.init.ones_, bias=False, tp_group=Alone(), **options
    )
    return layer, config


def test_the_output_layer_computes_its_weight_gradient_through_autograd(extension_missing):
    layer, config = linear()
    tokens = torch.arange(float(TOKENS * HIDDEN)).view(TOKENS, 1, HIDDEN)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer(tokens)[0].sum().backward()
    assert torch.equal(layer.weight.grad, tokens.sum((0, 1)).expand(VOCABULARY, HIDDEN))
    assert not layer.weight.main_grad.any()  # for DDP, whose hook adds the gradient once


def test_layers_of_transformer_engine_keep_the_fusion(extension_missing):
    layer, config = linear()
    assert config.gradient_accumulation_fusion and layer.config is config


def test_other_layers_of_megatron_raise_as_before(extension_missing):
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        linear(tp_comm_buffer_name="qkv")


def test_without_us_the_output_layer_cannot_be_built(monkeypatch):
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        linear()
