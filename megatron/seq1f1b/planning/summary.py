"""The block at the start: what runs, and what is predicted of it beside Megatron's own schedule."""

from ..arguments import PipelineConfig
from ..schedule import Clock, num_gathers
from .costs.machine import in_words
from .run_costs import RunCosts

# Up to this many segments, all lengths are printed.
_FEW = 8


def summary(config: PipelineConfig, costs: RunCosts, attention: str) -> str:
    """The block, several lines, for a configuration with one of our schedules; `attention` names its kernel."""
    run, schedule = config.run, config.schedule
    assert schedule is not None
    chunks = f", {run.num_chunks} model chunks each ({schedule.placement})" if run.num_chunks > 1 else ""
    rows = [
        ("schedule", schedule.name + (" with segments" if config.num_segments > 1 else "")),
        ("pipeline", f"{run.pipeline_parallel_size} ranks{chunks}, {run.num_microbatches} micro-batches"),
        ("segments", _segments(config)),
        ("attention", attention),
    ]
    if config.keeps_attention:
        rows.append(("recomputation", "all of a layer but its attention"))
    if config.offloads:
        rows.append(("host memory", f"{100 * config.offloads:.0f} % of the activations that a rank would hold"))
    if costs.has_loss_in_pieces:
        rows.append(("logits", "in pieces, again in the backward; a program that reads them gets them whole"))
    if config.partitions_state:
        rows.append(("state", f"shares of data-parallel ranks{_gathers(config)}"))
    rows += _predictions(config, costs)
    if run.settings.get("fp8"):
        rows.append(("not predicted", "the gains of --fp8-format: predictions are for 16 bits"))
    return _block("sequence-level pipeline parallelism", rows)


def copies_summary(config: PipelineConfig, costs: RunCosts, rate: float) -> str:
    """The block of a launch that moves activations at `rate` bytes/s each way, as measured."""
    rows = [("link", f"{rate / 1e9:.3g} GB/s each way, measured on the slowest rank while all copy both ways")]
    if _is_predicted(config):
        rows += _copies(config, costs, rate)
    return _block("activations to the memory of the host, and back", rows)


def _copies(config: PipelineConfig, costs: RunCosts, rate: float) -> list[tuple[str, str]]:
    """Predictions of the cost model for a measured rate."""
    assert config.schedule is not None
    try:
        found = costs.copies(config.schedule, config.lengths, config.offloads, rate)
    except ValueError:
        return []
    if found is None:
        return [("units", "none moves: all go backward soon after their forward")]
    need, time = found.unit_bytes / found.unit_seconds / 1e9, 1e3 * found.unit_seconds
    hidden = f"{100 * found.hidden:.0f} % of one direction beside compute, a step {100 * found.longer:.1f} % longer"
    return [
        ("predicted units", f"up to {in_words(found.unit_bytes)} a forward of {time:.3g} ms, so {need:.3g} GB/s"),
        ("predicted copies", hidden),
    ]


def _block(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"-- {title}", *(f"   {name:<{width}}  {text}" for name, text in rows)])


def _segments(config: PipelineConfig) -> str:
    if config.unit_tokens is not None:
        return f"units of at most {config.unit_tokens} tokens, of sequences as the data have them"
    if config.num_segments == 1:
        return f"1, sequences of {config.run.sequence_length} tokens stay whole"
    lengths = list(map(str, config.lengths))
    if len(lengths) > _FEW:
        lengths = [*lengths[: _FEW // 2], "...", *lengths[-_FEW // 2 :]]
    file = config.partition.file
    how = config.partition.strategy if file is None else str(file)
    by_documents = config.follows_documents and config.partition.follows_documents
    documents = "; each micro-batch by its own documents" if by_documents else ""
    return f"{config.num_segments}, {how}: {' '.join(lengths)} tokens{documents}"


def _gathers(config: PipelineConfig) -> str:
    """How often the first rank gathers weights, unless the order is still to be searched for."""
    run, schedule = config.run, config.schedule
    if schedule is None or schedule.is_planned:
        return ""
    plan = schedule.plan(run.shape(schedule.placement, config.num_segments), config.lengths, None)
    order = plan.order(0) if isinstance(plan, Clock) else plan.ranks[0]
    return f"; {num_gathers(order)} gathers of weights a step for {run.num_chunks} model chunks, 1 reduction of each"


def _is_predicted(config: PipelineConfig) -> bool:
    """Not for a model of unknown sizes, nor for sequences of unknown lengths."""
    return config.run.has_sizes and config.unit_tokens is None


def _predictions(config: PipelineConfig, costs: RunCosts) -> list[tuple[str, str]]:
    """Predictions of the cost model that also balances segments."""
    schedule = config.schedule
    if schedule is None or not _is_predicted(config):
        return []
    try:
        ours, own = costs.forecast(schedule, config.lengths), costs.forecast_of_megatron()
    except ValueError:
        return []
    of, bound = "Megatron's 1F1B", "at most " if schedule.is_planned else ""
    held, would_hold = in_words(ours.activations), in_words(own.activations)
    return [
        ("predicted bubble", f"{bound}{100 * ours.bubble:.1f} %, of {of} {100 * own.bubble:.1f} %"),
        ("predicted step", f"{bound}{ours.seconds / own.seconds:.2f} of the time of {of}"),
        ("predicted activations", f"{held} on the fullest rank, of {of} {would_hold}"),
    ]
