"""Published tables from a folder of the user's own."""

import csv

import pytest

import paper_tables
from paper.row import read


def write(folder, name, rows):
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        lines.writerows(rows)


def test_further_rows_are_predicted_whatever_their_sizes(tmp_path, capsys):
    """Interleaved schedules with other numbers of layers, and with as many micro-batches as ranks."""
    bubbles = next(row for row in read("zero_bubble_tables345") if row["method"] == "1F1B-I")
    write(tmp_path, "zero_bubble_tables345", [bubbles | {"layers": "46", "pipeline_gpus": "16", "micro_batches": "48"}])
    deep = next(row for row in read("megatron_sc21_table1") if int(row["v_derived"] or 1) > 1)
    ranks = deep["pipeline_parallel"]
    write(tmp_path, "megatron_sc21_table1", [deep | {"params_B": "1", "micro_batches_derived": ranks}])
    assert paper_tables.main(["--reference", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| Zero Bubble bubble rates | 1 |" in printed and "| Megatron SC21 table 1 | 1 |" in printed
    assert "vTrain" not in printed and '"1B, ' in printed


def test_a_table_that_cannot_be_predicted_is_a_sentence(tmp_path, capsys):
    name = "seq1f1b_7b_32gpu_throughput"
    row = read(name)[0]
    no_length = {column: value for column, value in row.items() if column != "seqlen"}
    for table, sentence in (
        (None, "it has no table by a name in"),
        (row | {"model": "8B"}, f"{name}.csv, line 2, column model: the sizes of 8B are not known; there are 2.7B"),
        (no_length, "seq1f1b_7b_32gpu_throughput.csv, line 2: there is no column seqlen"),
        (row | {"seqlen": "32k"}, f"{name}.csv, line 2, column seqlen: '32k' is not a whole number"),
        (row | {"throughput_tok_s": "fast"}, f"{name}.csv, line 2, column throughput_tok_s: 'fast' is not a number"),
    ):
        if table:
            write(tmp_path, name, [table])
        with pytest.raises(SystemExit):
            paper_tables.main(["--reference", str(tmp_path)])
        assert sentence in capsys.readouterr().err


def test_a_run_without_a_measurement_failed_or_did_not_fit(tmp_path, capsys):
    runs = read("kwai_offload_h800")[-2:]
    write(tmp_path, "kwai_offload_h800", [runs[0] | {"tokens_per_second_all_gpus": ""}, runs[1]])
    assert paper_tables.main(["--reference", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s,failed or out of memory," in printed and "| 1 |" in printed


def test_the_memory_of_runs_with_offload_is_predicted(tmp_path, capsys):
    for name in ("kwai_offload_memory_65b", "slimpipe_ultra_long"):
        write(tmp_path, name, read(name)[-2:])
    assert paper_tables.main(["--reference", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| Kwai with offload, memory | 4 |" in printed and "| SlimPipe memory model, ultra-long | 2 |" in printed
