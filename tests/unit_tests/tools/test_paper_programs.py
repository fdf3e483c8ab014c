"""The programs of the papers: what they take where they differ from this package, and TFLOPS by their formulas."""

from dataclasses import fields, replace

import pytest

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.layer_bytes import layer_activation, layer_keys_values, unit_bytes
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.schedule import Holds, Placement, build
from paper.flops import megatron_flops, seq1f1b_flops, terapipe_flops
from paper.megatron_tables import sc21_setup
from paper.programs import PaperSetup
from paper.row import gpt, read

WHOLE = TrainingSetup(preset("30b"), 65536, 8, placement=Placement(8))
SHARED = replace(WHOLE, tensor_parallel=8, sequence_parallel=True)


def paper(setup: TrainingSetup, **changes) -> PaperSetup:
    return PaperSetup(**({field.name: getattr(setup, field.name) for field in fields(setup)} | changes))


SAME = [{}, {"recompute": "core_attn"}, {"recompute": "full"}, {"family": "zb-h1"}]


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_a_program_without_differences_is_the_package(changes):
    ours = replace(SHARED, sequence_length=8192, segments=(4096, 2048, 2048), **changes)
    machine, theirs = read_machine("a100-80gb"), paper(ours)
    found, expected = predict(theirs, machine), predict(ours, machine)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-12) and found.memory == expected.memory


def test_a_gpt_keeps_34_bytes_a_token_and_hidden_unit():
    model = ModelShape(4, 1024, 4096, 16, 64, 32000)
    setup = PaperSetup(model, 2048, 1, dropout=True)
    held = layer_activation(setup, 0, 0, 1) + layer_keys_values(setup, 0, 0, 1)
    # The paper stores no log-sum-exp, and the mask of the dropout within attention takes a byte a score.
    assert held - 4 * model.num_heads == 34 * model.hidden_size


def test_weight_gradients_that_wait_hold_no_scores():
    setup = paper(WHOLE, sequence_length=2048, segments=(), family="zb-h1", flash_attention=False)
    apart, whole = (rank_memory(setup, build(family, setup.shape).ranks[7], 7) for family in ("zb-h1", "1f1b"))
    held, for_weights = (
        unit_bytes(setup, setup.stages[7], after).sum() for after in (Holds.ACTIVATIONS, Holds.FOR_WEIGHTS)
    )
    # The last rank holds one unit, and with weight gradients apart those of seven more.
    more = apart.activations + apart.keys_values + apart.logits - whole.activations - whole.keys_values - whole.logits
    assert more == pytest.approx(7 * for_weights, rel=0.05) and for_weights < 0.7 * held


def seq1f1b_rates():
    for row in read("seq1f1b_7b_32gpu_throughput"):
        if row["throughput_tok_s"] != "OOM" and not row["note"]:
            length, batch = int(row["seqlen"]), int(row["micro_batches"])
            seconds = batch * length / float(row["throughput_tok_s"])
            yield seq1f1b_flops(gpt(32, 4096, 32, 32768), length, batch) / seconds / 32, row["tflops_per_gpu"]


def megatron_rates():
    for row in read("megatron_sc21_table1"):
        setup = sc21_setup(row)
        flops = megatron_flops(setup.model, setup.sequence_length, int(row["batch"]))
        yield flops / float(row["iteration_s_derived_eq3"]) / int(row["gpus"]), row["tflops_per_gpu"]


def terapipe_rates():
    settings = {row["setting"]: row for row in read("terapipe_settings")}
    for row in read("terapipe_latency_main"):
        if row["tflops_per_gpu_reported"]:
            at = {name: int(value) for name, value in settings[row["setting"]].items() if value.isdigit()}
            model = gpt(at["layers"], at["hidden"], at["heads"], 0)
            flops = terapipe_flops(model, at["seqlen"], at["batch_per_replica"])
            gpus = at["pipeline_parallel"] * at["op_parallel"]
            yield flops / float(row["latency_s"]) / gpus, row["tflops_per_gpu_reported"]


@pytest.mark.parametrize(
    "rates, error", [(seq1f1b_rates, {"abs": 0.006}), (megatron_rates, {"rel": 1e-3}), (terapipe_rates, {"rel": 1e-3})]
)
def test_tflops_are_those_of_the_papers(rates, error):
    found = [(rate / 1e12, float(published)) for rate, published in rates()]
    assert found and all(rate == pytest.approx(published, **error) for rate, published in found)
