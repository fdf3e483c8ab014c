"""The first of 8 stages of the 2.7b model, alone on a GPU, in the order of its pipeline rank.

Its neighbours are left out: what they would send is random numbers. So it computes and keeps what a rank of the
pipeline does, and never waits.
"""

from gpu_tests.common import dtype_of  # before Megatron

# isort: split
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from functional_tests.equality.models import Model
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.stage_costs import A100, CPU_CORE, analytic_costs, bottleneck_time
from megatron.seq1f1b.model import HostMemory, LayerEnds, Segment, SegmentContext, attach
from megatron.seq1f1b.partition import Task, cut_sequence
from megatron.seq1f1b.schedule import MOVE_KINDS, Action, Kind, Placement, Shape, build
from support.segments import of_lengths

STAGES = 8
# Experts whose dispatcher makes the host wait for the GPU in each layer and unit.
DROPLESS = {
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


class Sizes(NamedTuple):
    """Of a stage; `tensor` divides heads and feed-forward block as so many tensor-parallel ranks do. Of so many
    `experts`, each an eighth of the feed-forward block, a token goes to two."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tensor: int = 1
    experts: int | None = None


# MODEL_SIZE=2.7b of the launch scripts.
OF_2_7B = Sizes(layers=4, hidden=2560, heads=32, vocabulary=32768)
TINY = Sizes(layers=1, hidden=32, heads=2, vocabulary=64)


class Stage:
    """The model, and the actions of its rank on sequences of any length. Without `by_segments` its layers are left as
    Megatron made them, for whole sequences."""

    def __init__(self, sizes: Sizes, device: str, longest: int, *, by_segments: bool = True) -> None:
        layers, hidden, heads, vocabulary, tensor, experts = sizes
        self.device = torch.device(device)
        self.dtype = dtype_of(device)
        self.shape = ModelShape(layers, hidden, 4 * hidden, heads, hidden // heads, vocabulary)
        widths = {"hidden_size": hidden, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden // tensor}
        if experts:
            widths |= {"num_moe_experts": experts, "moe_ffn_hidden_size": hidden // 2, **DROPLESS}
        model = Model(self.dtype, layers, heads // tensor, kv_heads=heads // tensor)
        self.model = GPTModel(
            model.but(**widths, bf16=self.dtype is torch.bfloat16).transformer_config(),
            get_gpt_layer_local_spec(num_experts=experts),
            vocabulary,
            longest,
            post_process=False,
            position_embedding_type="rope",
        ).to(self.device, self.dtype)  # norms, too, which are made in 32 bit
        # What training keeps besides weights and their gradients: fp32 weights and Adam's two moments.
        self.optimizer = [torch.empty(3, *x.shape, device=self.device) for x in self.model.parameters()]
        self.moved_bytes = 0  # to the host, in the last run
        self._by_segments = by_segments
        self.move(HostMemory())

    def move(self, host_memory: HostMemory) -> None:
        """From now on activations move to this memory."""
        self.context = SegmentContext(host_memory=host_memory)
        self.host_memory = host_memory
        LayerEnds(host_memory.end_layer).follow([self.model])
        if self._by_segments:
            attach([self.model], self.context)

    @property
    def gradient_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def run(self, segments: list[Segment], actions: list[Action]) -> None:
        """The forwards and backwards among `actions`, on sequences of these segments."""
        length = segments[-1].end
        tokens = torch.randint(self.shape.vocab_size, (1, length), device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        gradient = torch.randn(length, 1, self.shape.hidden_size, device=self.device, dtype=self.dtype)
        kept = {}
        moves = {action[2:] for action in actions if action.kind is Kind.OFFLOAD}
        self.moved_bytes = 0
        try:
            for action in actions:
                unit = action[2:]
                if action.kind in MOVE_KINDS:
                    self._move(action.kind, unit)
                    continue
                segment = replace(segments[action.segment], microbatch=action.microbatch)
                rows = slice(segment.start, segment.end)
                is_forward = action.kind is Kind.F
                before = self.host_memory.num_bytes
                with self.context.running(segment, True, unit, moves=is_forward and unit in moves):
                    if is_forward:
                        kept[unit] = self.model(tokens[:, rows], positions[:, rows], None)
                        self.moved_bytes += self.host_memory.num_bytes - before
                    else:
                        if unit in moves:
                            self.host_memory.wait(unit)
                        kept.pop(unit).backward(gradient[rows])
                        self.host_memory.end_backward(unit)
        finally:
            self.context.clear()

    def _move(self, kind: Kind, unit: tuple[int, int]) -> None:
        if kind is Kind.RELOAD:
            self.host_memory.reload(unit, nullcontext())
            return
        before = self.host_memory.num_bytes
        self.host_memory.offload(unit, nullcontext())
        self.moved_bytes += self.host_memory.num_bytes - before

    def free(self) -> None:
        """Give back what the last run left, gradients of weights too."""
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def segments(self, length: int, k: int) -> list[Segment]:
        device = CPU_CORE if self.device.type == "cpu" else A100
        time = bottleneck_time(analytic_costs(self.shape, (self.shape.num_layers,), device))
        return of_lengths(cut_sequence("balanced", Task(length, k, time=time, full_speed_rows=device.full_speed_rows)))


def first_rank(num_microbatches: int, k: int) -> list[Action]:
    return list(build("1f1b", Shape(Placement(STAGES), num_microbatches, k)).ranks[0])
