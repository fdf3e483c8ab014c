"""Steps whose activations go to the memory of the host and back."""

import pytest
import torch

from megatron.seq1f1b.model import host_memory
from megatron.seq1f1b.schedule import Kind
from support.one_rank import Stage, executor, run


@pytest.fixture(autouse=True)
def small_storages_move(monkeypatch):
    monkeypatch.setattr(host_memory, "SMALLEST", 1)


def offloading(share: float, schedule: str = "gpipe"):
    made = executor(schedule, k=4)
    made.offload(share)
    return made


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_gradients_are_those_without_moves(alone, schedule):
    model, found = Stage(), []
    for share in (0.0, 0.5, 1.0):
        model.zero_grad()
        runs = offloading(share, schedule)
        for _ in range(2):
            run(runs, model)
        found.append((runs, model.layers[0].weight.grad))
        assert (runs._host_memory.most_bytes > 0) == (share > 0)
    assert all(torch.equal(found[0][1], gradient) for _, gradient in found[1:])
    away = [runs._host_memory.most_bytes for runs, _ in found]
    assert away == sorted(away) and (schedule != "gpipe" or away[1] < away[2])


def test_a_step_records_its_moves_beside_compute(alone):
    runs = offloading(1.0)
    run(runs, Stage())
    spans = {kind: [s for s in runs.recorder.spans() if s.action.kind is kind] for kind in Kind}
    assert len(spans[Kind.OFFLOAD]) == len(spans[Kind.RELOAD]) > 4
    reading, compute = runs.recorder.reading(), spans[Kind.F] + spans[Kind.B]
    assert reading.busy == pytest.approx(sum(span.end - span.start for span in compute))


def test_evaluation_moves_nothing(alone):
    runs = offloading(1.0)
    with torch.no_grad():
        run(runs, Stage(), forward_only=True)
    assert runs._host_memory.most_bytes == 0


def test_a_failing_move_names_its_action(alone, monkeypatch):
    def broken(num_bytes):
        raise OSError("no space")

    monkeypatch.setattr(host_memory, "mapped_buffer", broken)
    with pytest.raises(MemoryError, match="no room .* lower --offload-activations") as failure:
        run(offloading(1.0), Stage())
    assert "failed at 0OFFLOAD0.0, among" in "\n".join(failure.value.__notes__)
