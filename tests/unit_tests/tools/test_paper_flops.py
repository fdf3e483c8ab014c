"""TFLOPS by the formulas of the papers, against the figures that they print."""

import pytest

from paper.flops import megatron_flops, seq1f1b_flops, terapipe_flops
from paper.megatron_tables import sc21_setup
from paper.row import gpt, read


def test_seq1f1b():
    for row in read("seq1f1b_7b_32gpu_throughput"):
        if row["throughput_tok_s"] == "OOM" or row["note"]:
            continue
        length, batch = int(row["seqlen"]), int(row["micro_batches"])
        seconds = batch * length / float(row["throughput_tok_s"])
        flops = seq1f1b_flops(gpt(32, 4096, 32, 32768), length, batch)
        assert flops / seconds / 32 / 1e12 == pytest.approx(float(row["tflops_per_gpu"]), abs=0.006)


def test_megatron():
    for row in read("megatron_sc21_table1"):
        setup = sc21_setup(row)
        flops = megatron_flops(setup.model, setup.sequence_length, int(row["batch"]))
        rate = flops / float(row["iteration_s_derived_eq3"]) / int(row["gpus"]) / 1e12
        assert rate == pytest.approx(float(row["tflops_per_gpu"]), rel=1e-3)


def test_terapipe():
    settings = {row["setting"]: row for row in read("terapipe_settings")}
    for row in read("terapipe_latency_main"):
        if row["tflops_per_gpu_reported"]:
            at = settings[row["setting"]]
            model = gpt(int(at["layers"]), int(at["hidden"]), int(at["heads"]), 0)
            flops = terapipe_flops(model, int(at["seqlen"]), int(at["batch_per_replica"]))
            gpus = int(at["pipeline_parallel"]) * int(at["op_parallel"])
            rate = flops / float(row["latency_s"]) / gpus / 1e12
            assert rate == pytest.approx(float(row["tflops_per_gpu_reported"]), rel=1e-3)
