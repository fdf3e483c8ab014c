"""Units that run in nodes of a plan, and move to the memory of the host."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from megatron.seq1f1b.model import HostMemory
from megatron.seq1f1b.runtime.forwards.schedule_plans import let_go_of_values

SIZE = 64  # x 64 x 4 bytes are above the smallest that move


def test_all_that_nodes_save_moves(monkeypatch):
    """Of a forward in two nodes, with another unit between; the output of all stays, for the next stage."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    memory = HostMemory()
    x = torch.randn(SIZE, SIZE)
    num_bytes = 4 * SIZE * SIZE

    def node(unit, value):
        given = value.detach().requires_grad_()
        with memory.keeping(unit):
            return SimpleNamespace(inputs=[given], output=given.sin().exp())

    nodes = [node("unit", x.clone())]
    other = node("other", x.clone())
    nodes.append(node("unit", nodes[0].output))
    output = nodes[-1].output
    wanted = x.sin().exp().sin().exp()
    let_go_of_values(nodes, output)
    memory.offload("unit", nullcontext())
    # The inputs and outputs of both, but for the output of all; what the first makes is given to the second.
    assert memory.num_bytes == 2 * num_bytes
    assert torch.equal(output, wanted)
    memory.reload("unit", nullcontext())
    memory.wait("unit")
    ones = torch.ones(SIZE, SIZE)
    output.backward(ones)
    nodes[0].output.backward(nodes[1].inputs[0].grad)
    again = x.clone().requires_grad_()
    again.sin().exp().sin().exp().backward(ones)
    assert torch.equal(nodes[0].inputs[0].grad, again.grad)
    memory.offload("other", nullcontext())  # held by its node
    assert memory.num_bytes == 0
    assert other.output.shape == x.shape
