"""Steps whose activations go to the memory of the host and back."""

import pytest
import torch

from megatron.seq1f1b.model.memory import storages
from megatron.seq1f1b.model.memory.host_memory import HostMemory
from megatron.seq1f1b.runtime import ActivationMemory
from megatron.seq1f1b.schedule import Kind
from support.linear_stages import Stage, executor, run


@pytest.fixture
def offloading(alone, monkeypatch):
    """All activations move, also small ones."""
    monkeypatch.setattr(storages, "SMALLEST", 1)
    return executor("gpipe", k=4, activations=ActivationMemory(offloads=1.0))


def test_a_step_records_its_moves_and_evaluation_has_none(offloading):
    with torch.no_grad():
        run(offloading, Stage(), forward_only=True)
    assert offloading.context.host_memory.most_bytes == 0
    run(offloading, Stage())
    spans = {kind: [s for s in offloading.recorder.spans() if s.action.kind is kind] for kind in Kind}
    assert len(spans[Kind.OFFLOAD]) == len(spans[Kind.RELOAD]) > 4
    reading, compute = offloading.recorder.reading(), spans[Kind.F] + spans[Kind.B]
    assert reading.busy == pytest.approx(sum(span.end - span.start for span in compute))


def test_a_failing_move_names_its_action(alone, monkeypatch):
    def broken(num_bytes):
        raise OSError("no space")

    monkeypatch.setattr(storages, "SMALLEST", 1)
    memory = ActivationMemory(offloads=1.0, host_memory=HostMemory(new_buffer=broken))
    offloading = executor("gpipe", k=4, activations=memory)
    with pytest.raises(MemoryError, match="no room .* lower --offload-activations") as failure:
        run(offloading, Stage())
    assert "failed at 0OFFLOAD0.0, among" in "\n".join(failure.value.__notes__)
