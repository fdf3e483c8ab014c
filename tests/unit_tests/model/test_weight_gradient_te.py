"""Transformer Engine's layers under our schedules: weights in 8 bits once a step."""

import torch

from megatron.seq1f1b.model import add_up_all_weight_gradients

TOKENS, HIDDEN = 5, 4


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
