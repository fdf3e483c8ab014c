"""Linear layers under our schedules: weights in 8 bits once a step, and output layers without NVIDIA apex."""

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import layers

from megatron.seq1f1b.model import add_up_all_weight_gradients
from megatron.seq1f1b.model.linear_layers import without_apex

TOKENS, HIDDEN, VOCABULARY = 5, 4, 6


class Quantised(torch.nn.Linear):
    """As Transformer Engine's layers do with 8-bit formats: the first unit of a step overwrites `main_grad`, and puts
    the weight into 8 bits; a unit that finds no such weight makes it."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN, bias=False)
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.quantised, self._fp8_workspaces = 0, {}
        self.weight.main_grad = torch.zeros_like(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.is_first_microbatch = False
        weight = None if is_first is None else self._fp8_workspaces.get("weight")
        if is_first or weight is None:
            self.quantised += 1
            weight = self.weight.detach().clone()
        if is_first is not None:
            self._fp8_workspaces["weight"] = weight
        output = (x @ weight.t()).requires_grad_()
        output.register_hook(lambda grad: self.add(grad.t() @ x, accumulate=not is_first))
        return output

    def add(self, grad: torch.Tensor, accumulate: bool) -> None:
        self.weight.main_grad.mul_(accumulate).add_(grad)


def test_weights_are_quantised_once_and_every_unit_adds_to_them():
    layer = Quantised()
    units = [torch.randn(TOKENS, HIDDEN) for _ in range(3)]
    for _ in range(2):
        add_up_all_weight_gradients([layer])  # as the executor does in every step
        layer.is_first_microbatch = True  # by Megatron, at the first unit of a step
        layer.weight.main_grad.zero_()
        layer.weight.data += 1
        before = layer.quantised
        outputs = [layer(x) for x in units]
        for output in reversed(outputs):
            output.sum().backward()
        assert layer.quantised == before + 1
        assert torch.equal(outputs[-1], units[-1] @ layer.weight.t())
        torch.testing.assert_close(layer.weight.main_grad, sum(x.sum(0) for x in units).expand(HIDDEN, -1))


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


def test_the_output_layer_gets_its_weight_gradient_by_autograd(extension_missing):
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
