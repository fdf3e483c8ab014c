"""The block that a launch prints at its start: what runs, its prediction, and advice."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import ceil
from operator import itemgetter

from msgspec import structs

from ..arguments import PipelineConfig
from ..arguments.unsupported import OurFeature, first_unsupported
from ..costs.run_costs import RunCosts
from ..costs.stage_costs import analytic_costs
from ..partition import segment_times
from ..report.text import in_words
from ..schedule import ScheduleChoice

_FEW = 8  # segments at most, to print all their lengths


def summary(config: PipelineConfig, costs: RunCosts, attention: str) -> str:
    """The block of a configuration with one of our schedules; `attention` is the name of its kernel."""
    run = config.run
    schedule = config.schedule
    assert schedule is not None
    cut = " with segments" if config.num_segments > 1 else ""
    chunks = f", {run.num_chunks} model chunks each ({schedule.placement})" if run.num_chunks > 1 else ""
    rows = [
        ("schedule", f"{schedule.title}{cut}"),
        ("pipeline", f"{run.pipeline_parallel_size} ranks{chunks}, {run.num_microbatches} micro-batches"),
        ("segments", _segments(config)),
        ("attention", attention),
    ]
    if schedule.pairs:
        rows.append(("experts", "exchange tokens beside the compute of another unit, which predictions leave out"))
    if config.offloads:
        rows.append(("host memory", f"{100 * config.offloads:.0f} % of the activations that a rank would hold"))
    if costs.has_loss_in_pieces:
        rows.append(("logits", "in pieces, again in the backward; a program that reads them gets them whole"))
    if config.flags.unit_tokens is None:
        with suppress(ValueError):  # of unknown sizes, or layers without costs
            rows += _predictions(costs, schedule, config.lengths)
    if run.settings.get("fp8"):
        rows.append(("not predicted", "the gains of --fp8-format: predictions are for 16 bits"))
    return _block("sequence-level pipeline parallelism", rows)


def copies_summary(config: PipelineConfig, costs: RunCosts, rate: float) -> str:
    """The block of a launch that moves activations at `rate` bytes/s each way, as measured."""
    rows = [("link", f"{rate / 1e9:.3g} GB/s each way, measured on the slowest rank while all copy both ways")]
    if config.schedule is not None and config.flags.unit_tokens is None:
        with suppress(ValueError):  # of unknown sizes, or layers without costs
            need = costs.host_rate(config.schedule, config.lengths, config.offloads)
            rows.append(("needed", f"{need / 1e9:.3g} GB/s, for every unit to leave while its forward runs"))
    return _block("activations to the memory of the host, and back", rows)


def _block(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"-- {title}", *(f"   {name:<{width}}  {text}" for name, text in rows)])


def _segments(config: PipelineConfig) -> str:
    if config.flags.unit_tokens is not None:
        return f"units of at most {config.flags.unit_tokens} tokens, with sequences of the data's own lengths"
    if config.num_segments == 1:
        return f"1, sequences of {config.run.sequence_length} tokens stay whole"
    lengths = list(map(str, config.lengths))
    if len(lengths) > _FEW:
        lengths = [*lengths[: _FEW // 2], "...", *lengths[-_FEW // 2 :]]
    how = config.partition.file or config.partition.strategy
    by_documents = config.follows_documents and config.partition.follows_documents
    documents = "; each micro-batch by its own documents" if by_documents else ""
    return f"{config.num_segments}, {how}: {' '.join(lengths)} tokens{documents}"


def _predictions(costs: RunCosts, schedule: ScheduleChoice, lengths: Sequence[int]) -> list[tuple[str, str]]:
    ours = costs.forecast(schedule, lengths)
    own = costs.forecast_of_megatron()
    other = "with Megatron's 1F1B"
    bound = "at most " if schedule.is_auto else ""
    held = in_words(ours.activations)
    would_hold = in_words(own.activations)
    return [
        ("predicted bubble", f"{bound}{100 * ours.bubble:.1f} %; {100 * own.bubble:.1f} % {other}"),
        ("predicted step", f"{bound}{ours.seconds / own.seconds:.2f} of the time {other}"),
        ("predicted activations", f"{held} on the fullest rank; {would_hold} {other}"),
    ]


def advice(config: PipelineConfig, costs: RunCosts) -> Iterator[str]:
    """Sentences, without their full stop, about what users of `config` may not expect."""
    schedule = config.schedule
    if schedule is None:
        return
    if config.num_segments > 1 and config.run.has_sizes and costs.machine.name != "cpu":
        yield from _advice_for_waiting_gpus(config, costs)
    if schedule.is_auto and not schedule.split:
        obstacle = first_unsupported(config.run.settings, {OurFeature.SPLIT_BACKWARDS})
        yield f"--pipeline-schedule auto plans without splitting backwards: {obstacle}"


def _advice_for_waiting_gpus(config: PipelineConfig, costs: RunCosts) -> Iterator[str]:
    """Advice if a GPU runs a layer of the fastest segment in less time than its host takes to launch it."""
    run = config.run
    host_seconds = costs.machine.host.layer_forward  # for a layer of any segment
    model = costs.model
    assert model is not None
    devices = run.tensor_parallel_size * (run.settings.get("context_parallel_size") or 1) / run.micro_batch_size
    device = structs.replace(costs.machine.device, kernel_latency=0.0)
    (all_layers,) = analytic_costs(model, (model.num_layers,), device, num_devices=devices)
    layer_seconds = [time / model.num_layers for time in segment_times(config.lengths, all_layers.forward)]
    fastest, length = min(zip(layer_seconds, config.lengths, strict=True), key=itemgetter(0))
    if fastest < host_seconds:
        # Times are nearly in proportion to lengths.
        enough_tokens = ceil(length * host_seconds / fastest)
        most_segments = int(sum(layer_seconds) / host_seconds)
        advice = "whole sequences keep GPUs busier"
        if most_segments > 1:
            advice = f"--sequence-splits {most_segments} keeps GPUs busy"
        yield (
            f"the segment of {length} tokens takes a GPU about {1e3 * fastest:.2g} ms a layer, "
            f"and its host about {1e3 * host_seconds:.2g} ms to launch it, so that the GPU waits, as with all "
            f"segments of less than about {enough_tokens} tokens; {advice}"
        )
