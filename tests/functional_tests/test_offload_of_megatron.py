"""What planner/space.py takes for granted of Megatron's fine-grained offload: it serves no layers that are recomputed
whole. A change here is one of docs/planning.md, too ("What Megatron accepts and does not run")."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from functional_tests.equality import layout, step
from functional_tests.equality.cases import Layout
from functional_tests.equality.models import Model
from megatron.seq1f1b.process.patches import Patch, PatchTable, patched
from support.stream_order import Moment, Streams

MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm")
HALF_OF_THE_LAYERS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}


class Copies(NamedTuple):
    """How tensors came back in a step: behind their copy to the host or not, and beside compute or not."""

    ordered: int
    unordered: int
    beside_compute: int


class Host:
    """Takes the place of copies to the memory of a host and back, and counts those back."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._left: dict[torch.Tensor, Moment] = {}
        self.counted = Copies(0, 0, 0)

    def take(self, handler, tensor, pin_memory=True, use_cpu_pool=True):
        kept = tensor.detach().clone()
        self._left[kept] = self._streams.current.run()
        return tensor.device, kept, use_cpu_pool

    def give(self, handler, state, non_blocking=None):
        _, kept, _ = state
        is_ordered = self._streams.current.comes_after(self._left.pop(kept))
        is_aside = self._streams.current is not self._streams.compute
        ordered, unordered, aside = self.counted
        self.counted = Copies(ordered + is_ordered, unordered + (not is_ordered), aside + is_aside)
        return kept.clone()

    @property
    def patches(self) -> PatchTable:
        module = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
        reason = "moves tensors of a CPU"
        return (
            Patch(f"{module}.ChunkOffloadHandler.offload", self._bound(self.take), reason),
            Patch(f"{module}.ChunkOffloadHandler.reload", self._bound(self.give), reason),
            Patch(f"{module}.ChunkOffloadHandler._can_manage_tensor_for_offload", staticmethod(_is_activation), reason),
            Patch("torch.Tensor.record_stream", lambda tensor, stream: None, reason),
            # Megatron tells Transformer Engine, which its local layers do without.
            Patch("megatron.core.extensions.transformer_engine.cpu_offload", SimpleNamespace(), reason),
        )

    @staticmethod
    def _bound(method):
        return lambda *args, **options: method(*args, **options)


def _is_activation(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


def copies(recompute: dict) -> list[Copies]:
    """Of each of three steps of two micro-batches, without a pipeline."""
    streams = Streams()
    host = Host(streams)
    found = []
    with patched(streams.patches), patched(host.patches):
        PipelineOffloadManager.reset_instance()
        offload = {"fine_grained_activation_offloading": True, "offload_modules": MODULES}
        chunks = layout.build(Model().but(min_offloaded_tensor_size=1, **offload, **recompute), Layout())
        case = SimpleNamespace(m=2, batch=2, mask=None, packed=None)
        for _ in range(3):
            host.counted = Copies(0, 0, 0)
            step.run(forward_backward_no_pipelining, chunks, case, 0, 1)
            found.append(host.counted)
    return found


def of_both() -> tuple[list[Copies], list[Copies]]:
    return copies({}), copies(HALF_OF_THE_LAYERS)


def test_copies_of_recomputed_layers_have_no_order(launch):
    """From the second step on, when Megatron knows what there is to move. A recomputed layer moves its activations to
    the host in its backward, and reads them back without waiting until they are there."""
    ((plain, recomputed),) = launch.call(1, of_both)
    for ordered, unordered, beside_compute in plain[1:]:
        assert ordered > 0 and unordered == 0 and beside_compute == ordered
    for _, unordered, beside_compute in recomputed[1:]:
        assert unordered > 0 and beside_compute == 0
