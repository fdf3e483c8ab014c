"""Programs on segments against the same programs on whole sequences, by Megatron's own schedule and attention.

The program is not changed, and has no line for segments: it calls `install` and keeps its code.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

import megatron.seq1f1b
from functional_tests.equality.cases import Layout
from functional_tests.equality.comparison import each_replica_alone, error, patches_of, plain
from functional_tests.equality.layout import build, groups_of, has_loss, named, replicas_of, use_ranks
from functional_tests.equality.models import Model, hybrid, mixture
from functional_tests.equality.step import gather_sharded_gradients
from functional_tests.programs.program import EachAlone, Program, of_report
from megatron.seq1f1b.process.patches import patched

SEGMENT_TOKENS = 8


@dataclass(frozen=True)
class Setting:
    """Where programs run: a model in a layout, and keywords of `install`."""

    model: Model
    layout: Layout
    options: tuple[tuple[str, str], ...] = ()


def options(**given: str) -> tuple[tuple[str, str], ...]:
    return tuple(given.items())


PLAIN = Model(layers=4)
EXPERTS = mixture(layers=4, moe_token_dispatcher_type="alltoall")
HYBRID = hybrid("GM*-")
RECOMPUTED = PLAIN.but(recompute="full")
SPLIT, OFFLOADED = options(pipeline_schedule="zb-h1"), options(pipeline_schedule="gpipe", offload_activations="1")
PIPELINE, CHUNKS = Layout(pipeline=2), Layout(pipeline=2, chunks=2)
V = Layout(pipeline=2, chunks=2, style="v")
IN_V = options(pipeline_placement="v")
CONTEXT = Layout(context=2)
TENSOR = Layout(tensor=2, sequence_parallel=True)

SETTINGS = {
    "pp1": Setting(PLAIN, Layout()),
    "pp2": Setting(PLAIN, PIPELINE),
    "pp2-zb-h1": Setting(PLAIN, PIPELINE, SPLIT),
    "pp2-auto": Setting(PLAIN, PIPELINE, options(pipeline_schedule="auto")),
    "pp2-breadth-first": Setting(PLAIN, PIPELINE, options(pipeline_schedule="breadth-first")),
    "pp2-whole": Setting(PLAIN, PIPELINE, options(segment_tokens="4096")),
    "pp2-splits": Setting(PLAIN, PIPELINE, options(sequence_splits="3")),
    "pp2-balanced": Setting(PLAIN, PIPELINE, options(sequence_splits="4", sequence_split_strategy="balanced")),
    "pp2-recomputed": Setting(RECOMPUTED, PIPELINE),
    "pp2-offload": Setting(PLAIN, PIPELINE, OFFLOADED),
    "pp2-experts": Setting(EXPERTS, PIPELINE),
    "pp2-hybrid": Setting(HYBRID, PIPELINE),
    "pp2-chunks": Setting(PLAIN, CHUNKS),
    "pp2-chunks-zb-h1": Setting(PLAIN, CHUNKS, SPLIT),
    "pp2-v": Setting(PLAIN, V, IN_V),
    "tp2": Setting(PLAIN, TENSOR),
    "dp2": Setting(PLAIN, Layout()),
    "dp2-experts": Setting(EXPERTS, Layout(expert=2)),
    "pp4": Setting(PLAIN, Layout(pipeline=4)),
    "pp4-hybrid": Setting(HYBRID, Layout(pipeline=4)),
    "pp2-tp2": Setting(PLAIN, Layout(pipeline=2, tensor=2, sequence_parallel=True)),
    "pp2-dp2": Setting(PLAIN, Layout(pipeline=2, overlap=True, distributed_optimizer=True)),
    "pp2-dp2-experts": Setting(EXPERTS, Layout(pipeline=2, expert=2)),
    "cp2": Setting(PLAIN, CONTEXT),
    "cp2-whole": Setting(PLAIN, CONTEXT, options(segment_tokens="64")),
    "pp2-cp2": Setting(PLAIN, Layout(pipeline=2, context=2)),
}


def run_programs(names: list[str], seeds: int) -> None:
    """Programs of so many seeds in each of these settings; rank 0 prints a line for each."""
    for number, name in enumerate(names):
        setting = SETTINGS[name]
        for seed in range(seeds):
            program = Program.drawn(1000 * number + seed)
            with patched(patches_of(setting.model)):  # which keep exact models exact
                errors = compare(program, setting)
            of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, errors)
            if dist.get_rank() == 0:
                print(f"program {name}/{seed}: {in_words(of_ranks)} ({program})", flush=True)


def in_words(of_ranks: list[dict[str, float]]) -> str:
    found = [(size, f"{name}, on rank {rank}") for rank, errors in enumerate(of_ranks) for name, size in errors.items()]
    size, what = max(found)
    return f"equal, {len(found)} values" if size <= 1e-10 else f"{what} differs by {size:.1e}"


def compare(program: Program, setting: Setting) -> dict[str, float]:
    """The relative errors of all that this rank finds, by name."""
    model, layout = setting.model, setting.layout
    divisor = layout.tensor if layout.sequence_parallel else 1
    if layout.context > 1:
        divisor = 2 * layout.context
    use_ranks(layout)
    replica = parallel_state.get_data_parallel_rank()
    data = [program.data(divisor, number) for number in range(replicas_of(layout))]
    counts = [float(each["mask"][1:].sum()) for of_replica in data for batch in of_replica for each in batch]
    forward_step = program.forward_step(sum(counts))
    expected_reports, expected = _expected(program, model, layout, data, forward_step, replica)

    chunks = build(model, layout)
    chunks[0].config.variable_seq_lengths = True
    given = dict(setting.options)
    if not {"sequence_splits", "segment_tokens"} & given.keys():
        given["segment_tokens"] = str(SEGMENT_TOKENS)
    megatron.seq1f1b.install(**given)
    try:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        step = partial(
            get_forward_backward_func(),
            forward_step_func=forward_step,
            model=chunks,
            num_microbatches=program.microbatches,
            seq_length=1,
            micro_batch_size=1,
            decoder_seq_length=1,  # as Megatron's loop and Megatron-Bridge's give it, whatever a batch holds
            pg_collection=groups_of(layout),
        )
        with torch.no_grad():
            evaluated = step(data_iterator=_iterators(program, data[replica], chunks), forward_only=True)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reports = step(data_iterator=_iterators(program, data[replica], chunks))
    finally:
        megatron.seq1f1b.uninstall()
    gather_sharded_gradients(chunks)
    errors = {name: error(param.main_grad, expected[name]) for name, param in named(chunks)}
    wanted = expected_reports if has_loss(layout) else []
    for what, found in (("step", reports), ("evaluation", evaluated)):
        errors[f"number of reports of the {what}"] = abs(len(found) - len(wanted))
        for microbatch, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
            # Megatron's schedule divides a loss in place, but reports here are copies.
            pairs = zip(of_report(mine), of_report(theirs), strict=True)
            sizes = [abs(one - other) / max(1e-3, abs(other)) for one, other in pairs]
            errors[f"report of micro-batch {microbatch} of the {what}"] = max(sizes, default=0.0)
    return errors


def _iterators(program: Program, data: list, chunks: list) -> list:
    return [program.iterator(data) for _ in chunks]


def _expected(program, model, layout, data, forward_step, replica) -> tuple[list, dict]:
    """The reports of this replica, and the gradients of all, of the whole model on one stage, each document alone."""
    alone = Layout(tensor=layout.tensor, sequence_parallel=layout.sequence_parallel, expert_tensor=layout.expert_tensor)
    use_ranks(alone)
    with patched(each_replica_alone()):
        chunks = build(plain(model), alone)
        parameters = dict(named(chunks))
        chunks[0].module = EachAlone(chunks[0].module)
        total: dict[str, torch.Tensor] = {}
        reports = []
        for number, of_replica in enumerate(data):
            chunks[0].zero_grad_buffer()
            found = forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=program.iterator(of_replica),
                model=chunks[0],
                num_microbatches=program.microbatches,
                seq_length=1,
                micro_batch_size=1,
            )
            if number == replica:
                reports = found
            for name, param in parameters.items():
                total[name] = total.get(name, 0) + param.main_grad / len(data)
    return reports, total
