"""What one rank shows of Transformer Engine's layers on a CPU: grouped products, and the names of a checkpoint.

Gradients of the weights of a grouped linear layer apart are those of its own backward.
"""

import torch
import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from transformer_engine.pytorch import GroupedLinear  # noqa: E402

from functional_tests.equality.layout import Layout, build  # noqa: E402
from functional_tests.equality.models import Model  # noqa: E402
from megatron.seq1f1b.model import WeightGradientStore, use_segment_attention  # noqa: E402
from megatron.seq1f1b.model.weight_gradient_te import products_left_in  # noqa: E402

EXPERTS = 3
# Tokens of each expert in two units; one has none.
UNITS = {"first": [4, 0, 2], "second": [1, 3, 5]}


def layer(is_fused: bool) -> GroupedLinear:
    torch.manual_seed(0)
    made = GroupedLinear(
        EXPERTS, 6, 5, bias=False, params_dtype=torch.float64, device="cpu", fuse_wgrad_accumulation=is_fused
    )
    for expert, parameter in enumerate(made.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(expert))
        if is_fused:
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
    return made


def gradients(made: GroupedLinear, is_fused: bool) -> list[torch.Tensor]:
    return [(weight.main_grad if is_fused else weight.grad).clone() for weight in made.parameters()]


def forward(made: GroupedLinear, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    inputs = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64).requires_grad_()
    output = made(inputs, torch.tensor(sizes))
    return inputs, (output * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum()


def whole(is_fused: bool) -> list[torch.Tensor]:
    made, of_inputs = layer(is_fused), []
    for sizes in UNITS.values():
        inputs, loss = forward(made, sizes)
        loss.backward()
        of_inputs.append(inputs.grad)
    return [*of_inputs, *gradients(made, is_fused)]


def apart(is_fused: bool) -> list[torch.Tensor]:
    """Both units go backward before the weight gradients of the second, then of the first, are computed."""
    made, store, of_inputs = layer(is_fused), WeightGradientStore(), []
    hooked = []
    for number, weight in enumerate(made.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: hooked.append(number))
    with products_left_in(store, made.modules()):
        for unit, sizes in UNITS.items():
            inputs, loss = forward(made, sizes)
            with store.collecting(unit):
                loss.backward()
            of_inputs.append(inputs.grad)
        assert not hooked and all(weight.grad is None for weight in made.parameters())
        for unit in reversed(UNITS):
            store.compute(unit)
            assert sorted(hooked) == list(range(EXPERTS)), "a hook for each weight, once"
            hooked.clear()
    store.assert_empty()
    return [*of_inputs, *gradients(made, is_fused)]


def names_of_a_checkpoint() -> None:
    """Our attention leaves all of them but that of its own fp8 state, which holds nothing without fp8."""
    chunks = build(Model(transformer_engine="unfused"), Layout())
    before = chunks[0].state_dict()
    use_segment_attention(chunks)
    gone = before.keys() - chunks[0].state_dict().keys()
    assert chunks[0].state_dict().keys() <= before.keys()
    assert gone and all(name.endswith(".core_attention._extra_state") for name in gone), gone
    assert all(before[name] is None or before[name].numel() == 0 for name in gone)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    names_of_a_checkpoint()
    for is_fused in (False, True):
        for ours, own in zip(apart(is_fused), whole(is_fused), strict=True):
            assert own.abs().max() > 0.1
            torch.testing.assert_close(ours, own, rtol=0, atol=1e-12)
    print("equal")
