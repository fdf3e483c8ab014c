"""What there is to choose from: every configuration that Megatron's rules allow for a question."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..costs.flops import authors_flops
from ..costs.kernels import BYTES
from ..costs.machine import Machine
from ..costs.model_shape import ModelShape
from ..costs.stage_times import head_time, layer_time
from ..costs.training_setup import Software, TrainingSetup, even_layers
from ..partition import PartitionError, balanced, even, uniform_comp
from ..schedule import Placement

_MOST_SEGMENTS = 16
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Question:
    """What is asked: a model, a number of devices of a machine, a length and a batch of sequences.

    `memory_gib` is what a device may take, by default what it has. A tuple of choices limits the search to them.
    """

    model: ModelShape
    machine: Machine
    num_devices: int
    sequence_length: int
    global_batch_size: int
    memory_gib: float | None = None
    families: tuple[str, ...] = ("1f1b", "zb-h1")
    recomputes: tuple[str, ...] = ("none", "full")
    software: Software = Software()

    @property
    def memory_limit(self) -> float:
        return self.memory_gib or self.machine.device.memory_gib


@dataclass(frozen=True)
class Candidate:
    """A set-up with the name of the strategy that cut its sequences."""

    setup: TrainingSetup
    strategy: str = "none"


def candidates(question: Question) -> Iterator[Candidate]:
    """Every configuration that Megatron's rules allow; whether it fits and how fast it is comes later.

    Sizes of the parallel groups are powers of two or divisors of the number of devices; tensor and context parallelism
    stay within a node. Segments come in the powers of two up to 16, cut three ways; layers are spread evenly, or with
    fewer on the stages of embedding and head.
    """
    model = question.model
    kv_heads = model.num_kv_heads or model.num_heads
    for tensor in _powers(question.machine.devices_per_node):
        if model.num_heads % tensor or kv_heads % tensor or model.vocab_size % tensor:
            continue
        for context in _powers(question.machine.devices_per_node // tensor):
            if kv_heads % (tensor * context) or question.sequence_length % (tensor * context):
                continue
            for pipeline in _divisors(question.num_devices // (tensor * context)):
                data, rest = divmod(question.num_devices, tensor * context * pipeline)
                if rest or pipeline > model.num_layers:
                    continue
                yield from _of_layout(question, tensor, context, pipeline, data)


def _of_layout(question: Question, tensor: int, context: int, pipeline: int, data: int) -> Iterator[Candidate]:
    for micro_batch in _MICRO_BATCHES:
        microbatches, rest = divmod(question.global_batch_size, data * micro_batch)
        if rest or not microbatches:
            continue
        for chunks in (1, 2, 4) if pipeline > 1 else (1,):
            if chunks > 1 and question.model.num_layers % (pipeline * chunks):
                continue
            for recompute in question.recomputes:
                for family in question.families if pipeline > 1 else ("1f1b",):
                    if family == "zb-h1" and (recompute == "full" or chunks > 1):
                        continue
                    setup = TrainingSetup(
                        model=question.model,
                        sequence_length=question.sequence_length,
                        num_microbatches=microbatches,
                        micro_batch_size=micro_batch,
                        tensor_parallel=tensor,
                        context_parallel=context,
                        data_parallel=data,
                        placement=Placement(pipeline, chunks),
                        family=family,
                        sequence_parallel=tensor > 1,
                        recompute=recompute,
                        distributed_optimizer=True,
                        software=question.software,
                    )
                    for spread in _spreads(question, setup):
                        yield Candidate(spread)
                        yield from _cut(question, spread)


def _spreads(question: Question, setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Layers spread evenly, and with as many fewer on the last stage as the head takes time of."""
    stages = setup.placement.num_stages
    if question.model.num_layers % stages == 0:
        yield setup
    if stages < 3 or setup.placement.num_chunks > 1:
        return
    fewer = _layers_of_head(setup, question.machine)
    last = question.model.num_layers // stages - fewer
    if fewer and last > 0 and (question.model.num_layers - last) % (stages - 1) == 0:
        yield replace(setup, layers_per_stage=(*even_layers(question.model.num_layers - last, stages - 1), last))


@lru_cache(maxsize=1024)
def _layers_of_head(setup: TrainingSetup, machine: Machine) -> int:
    head = head_time(setup, machine, 0, setup.sequence_length)
    layer = layer_time(setup, machine, 0, setup.sequence_length)
    return round((head.forward + head.input + head.weight) / (layer.forward + layer.input + layer.weight))


def _cut(question: Question, setup: TrainingSetup) -> Iterator[Candidate]:
    if setup.pipeline_parallel == 1:
        return
    multiple = setup.tensor_parallel * setup.context_parallel
    for segments in _powers(_MOST_SEGMENTS):
        if segments == 1:
            continue
        for strategy in ("even", "uniform_comp", "balanced"):
            try:
                lengths = _lengths(strategy, setup, question.machine, segments, multiple)
            except PartitionError:
                continue
            yield Candidate(replace(setup, segments=lengths), strategy)


def _lengths(strategy: str, setup: TrainingSetup, machine: Machine, segments: int, multiple: int) -> tuple[int, ...]:
    length = setup.sequence_length
    if strategy == "even":
        return even(length, segments, multiple)
    if strategy == "uniform_comp":
        return uniform_comp(length, segments, *authors_flops(setup.model), multiple)
    return _balanced(setup.model, machine, length, segments, multiple, setup.tensor_parallel, setup.context_parallel)


@lru_cache(maxsize=4096)
def _balanced(
    model: ModelShape, machine: Machine, length: int, segments: int, multiple: int, tensor: int, context: int
) -> tuple[int, ...]:
    """By the time of a layer, of which two points give the law: a part per token and a part per pair."""
    setup = TrainingSetup(
        model, length, 1, tensor_parallel=tensor, context_parallel=context, sequence_parallel=tensor > 1
    )
    layer = layer_time(setup, machine, 0, length)
    pairs = length * (length + 1) / 2
    per_pair = (layer.forward_attention + layer.input_attention) / pairs
    per_token = (layer.forward + layer.input + layer.weight) / length - per_pair * (length + 1) / 2

    def time(start: int, end: int) -> float:
        return (end - start) * (per_token + per_pair * (start + end + 1) / 2)

    return balanced(length, segments, time, multiple)


def static_bytes(setup: TrainingSetup) -> float:
    """Weights, gradients and optimizer state of the fullest rank: what no schedule changes."""
    most = max(
        sum(setup.stage_parameters(stage) for stage in setup.placement.stages_of(rank))
        for rank in range(setup.pipeline_parallel)
    )
    sharded = setup.data_group.size if setup.distributed_optimizer else 1
    return most * (BYTES + setup.software.gradient_bytes + 12 / sharded)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(most, 1).bit_length()) if 1 << exponent <= most]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
