"""Weight gradients of linear layers at the chosen time, by any unit; weights in 8 bits once a step."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron.seq1f1b.model import add_up_all_weight_gradients
from megatron.seq1f1b.model.memory.weight_gradient import WeightGradientStore, deferring

TOKENS, BATCH, IN, OUT = 5, 2, 4, 3


class Layer:
    """A linear layer with its weight gradient in a store, called like Megatron's."""

    def __init__(self, fusion: bool = False, has_bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(OUT, IN, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(OUT, generator=generator)) if has_bias else None
        self.store = WeightGradientStore()
        options = {"gradient_accumulation_fusion": fusion, "tp_group": SimpleNamespace(size=lambda: 1)}
        options |= dict.fromkeys(("allreduce_dgrad", "sequence_parallel"), False)
        options |= dict.fromkeys(("grad_output_buffer", "wgrad_deferral_limit"))
        linear = partial(layers.ColumnParallelLinear._forward_impl, None)
        self._linear = partial(deferring(linear, self.store), **options)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._linear(input=input, weight=self.weight, bias=self.bias)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, IN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def expected(layer: Layer, *inputs: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.detach().requires_grad_()
    loss = sum(torch.nn.functional.linear(x, weight, layer.bias).square().sum() for x in inputs)
    return torch.autograd.grad(loss, weight)[0]


def go_backward(layer: Layer, unit: int, input: torch.Tensor) -> None:
    layer.store.unit = unit
    layer(input).square().sum().backward()


@pytest.mark.parametrize("has_bias", [False, True])
def test_units_come_in_any_order_with_the_hooks_of_a_weight(has_bias):
    layer, inputs, heard = Layer(has_bias=has_bias), [tokens(seed) for seed in range(3)], []
    accumulator = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: heard.append(layer.weight.grad.clone()))
    for unit, input in enumerate(inputs):
        go_backward(layer, unit, input)
    assert heard == [] and (layer.bias is None or layer.bias.grad is not None)
    for done in ([2], [2, 0], [2, 0, 1]):
        layer.store.compute(done[-1])
        torch.testing.assert_close(heard[-1], expected(layer, *(inputs[unit] for unit in done)))
    layer.store.assert_empty()
    assert len(heard) == 3


def test_what_a_weight_gradient_is_made_of_is_freed_with_it():
    layer = Layer()
    input = tokens().exp()  # owned by the graph
    alive = weakref.ref(input.untyped_storage())
    go_backward(layer, 0, input)
    del input
    assert alive() is not None
    with pytest.raises(AssertionError, match="1 units"):
        layer.store.assert_empty()
    layer.store.compute(0)
    assert alive() is None


def test_without_anything_to_split_the_layer_is_left_alone():
    frozen = Layer()
    frozen.weight.requires_grad_(False)
    go_backward(frozen, 0, tokens())
    first = Layer()  # its input has no gradient, so nothing waits for one
    go_backward(first, 0, input := tokens().detach())
    torch.testing.assert_close(first.weight.grad, expected(first, input))
    with torch.no_grad():
        assert not first(tokens()).requires_grad


def test_a_layer_that_a_program_calls_by_itself_is_left_alone():
    layer = Layer()
    input = tokens()
    layer(input).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected(layer, input))
    layer.store.assert_empty()


@pytest.mark.parametrize("zero_out", [False, True])
def test_the_fused_kernel_adds_to_main_grad_and_marks_it(monkeypatch, zero_out):
    # As Apex's, of 2D operands only.
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=lambda rows, grad, main_grad: main_grad.addmm_(grad.t(), rows))
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    layer, input = Layer(fusion=True), tokens()
    layer.weight.main_grad = torch.ones(OUT, IN)
    layer.weight.grad_added_to_main_grad = False
    layer.weight.zero_out_wgrad = zero_out
    go_backward(layer, 0, input)
    layer.store.compute(0)
    torch.testing.assert_close(layer.weight.main_grad, 1 + expected(layer, input))
    assert layer.weight.grad_added_to_main_grad
    assert not zero_out or not layer.weight.grad.any()


class Quantised(torch.nn.Linear):
    """As Transformer Engine's layers do with 8-bit formats: the first unit of a step overwrites `main_grad`, and puts
    the weight into 8 bits; a unit that finds no such weight makes it."""

    def __init__(self) -> None:
        super().__init__(IN, IN, bias=False)
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
    units = [torch.randn(TOKENS, IN) for _ in range(3)]
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
        torch.testing.assert_close(layer.weight.main_grad, sum(x.sum(0) for x in units).expand(IN, -1))
