"""Headline claims of the papers, predicted."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.schedule import Placement

from . import megatron_tables, seq1f1b_tables, terapipe_tables
from .flops import megatron_flops
from .row import fits, gpt, read


def thirty_billion_at_64k() -> Iterator[str]:
    """Which methods hold 30B at 65536 tokens on 64 A100 without recomputation."""
    machine = read_machine("a100-seq1f1b")
    yield f"| method | fullest rank | GiB, of {machine.device.memory_gib:.1f} | verdict |"
    yield "|---|---|---|---|"
    layers, hidden, heads, tensor, pipeline = seq1f1b_tables.MODELS["30B"]
    model = gpt(layers, hidden, heads, 32768)
    # How many chunks Seq1F1B-I had is not published; see MISSES in paper_tables.py.
    methods = [(method, method, None) for method in seq1f1b_tables.METHODS if method != "Seq1F1B-I"]
    methods += [(f"Seq1F1B-I of {chunks} chunks", "Seq1F1B-I", chunks) for chunks in (2, 4)]
    for name, method, chunks in methods:
        prediction = predict(
            seq1f1b_tables.setup_of(model, 65536, 16, tensor, pipeline, method, chunks=chunks), machine
        )
        totals = [memory.total / GIB for memory in prediction.memory]
        verdict = f"{prediction.tokens_per_second:.0f} tokens/s" if fits(prediction) else "out of memory"
        yield f"| {name} | {totals.index(max(totals))} | {max(totals):.1f} | {verdict} |"


def terapipe_175b() -> Iterator[str]:
    """Settings 9 and 10: GPT-3 175B on 48 p3.16xlarge, whole and in equal slices."""
    machine = read_machine("v100-p3")
    yield "| setting | whole | best number of slices | step | speed-up |"
    yield "|---|---|---|---|---|"
    for setting in read("terapipe_settings"):
        if setting["model"] != "GPT3-175B":
            continue
        seconds = {
            count: predict(terapipe_tables.setup_of(setting, even(2048, count)), machine).seconds
            for count in terapipe_tables.SLICES
        }
        best = min(seconds, key=seconds.__getitem__)
        shape = f"PP {setting['pipeline_parallel']}, TP {setting['op_parallel']}"
        yield (
            f"| {setting['setting']} ({shape}) | {seconds[1]:.2f} s | {best} | {seconds[best]:.2f} s | "
            f"{seconds[1] / seconds[best]:.1f} |"
        )


def trillion() -> Iterator[str]:
    """1T on 3072 A100, and what interleaving gains in the rows of the table that use it."""
    machine = read_machine("a100-80gb")
    yield "| model | GPUs | chunks | step | PFLOP/s, published | PFLOP/s | of the peak | without chunks |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in read("megatron_sc21_table1"):
        if float(row["params_B"]) < 100:
            continue
        setup = megatron_tables.sc21_setup(row)
        prediction = predict(setup, machine)
        chunks = setup.placement.num_chunks
        total = megatron_flops(setup.model, setup.sequence_length, setup.global_batch_size) / prediction.seconds
        share = total / setup.num_devices / machine.device.peak_flops
        slower = "-"
        if chunks > 1:
            plain = replace(setup, placement=Placement(setup.pipeline_parallel), layers_per_stage=())
            slower = f"{100 * (1 - prediction.seconds / predict(plain, machine).seconds):.1f} % slower"
        yield (
            f"| {row['params_B']}B | {row['gpus']} | {chunks} | {prediction.seconds:.1f} s | "
            f"{row['aggregate_pflops']} | {total / 1e15:.0f} | {100 * share:.0f} % | {slower} |"
        )
