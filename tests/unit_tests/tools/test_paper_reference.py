"""Published tables from a folder of the user's own."""

import csv
import re

import pytest

import paper_tables
from paper.row import REFERENCE, read
from support.launch import ROOT


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
        (None, "its tables need names and columns of those in tools/paper/reference"),
        (row | {"model": "8B"}, f"{name}.csv, line 2, column model: '8B' is not known; there are 2.7B"),
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


OF_MEGATRON = "megatron_recompute_table5"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"iteration_s": "0"}, "line 2, column iteration_s: a measurement of 0; leave the cell of a run that failed"),
        ({"iteration_s": "-3"}, "line 2, column iteration_s: '-3' is not a number from 0 on"),
        ({"tp": "0"}, "line 2, column tp: 0 is not above 0"),
        ({"gpus": "64"}, "line 2: gpus 64, but TP 8 takes 8"),
        ({"dp": "2", "gpus": "16"}, "line 2: global_batch 4 is no multiple of dp 2 x micro_batch 4"),
        ({"recompute": "some"}, "line 2, column recompute: 'some' is not known; there are none, selective, full"),
        ({"sequence_parallel": "maybe"}, "line 2, column sequence_parallel: 'maybe' is not known"),
        ({"hidden_size": "6145"}, "64 heads do not divide the hidden size 6145"),
    ],
)
def test_a_row_that_contradicts_itself_is_a_sentence(tmp_path, capsys, changed, sentence):
    write(tmp_path, OF_MEGATRON, [read(OF_MEGATRON)[0] | changed])
    with pytest.raises(SystemExit):
        paper_tables.main(["--reference", str(tmp_path)])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"gpus": "100"}, "100 GPUs are no multiple of TP 2 x CP 1 x PP 8"),
        ({"gbs": "2047"}, "a batch of 2047 is no multiple of 16 replicas x micro-batches of 1"),
        ({"precision": "fp16"}, "line 2, column precision: 'fp16' is not known; there are bf16, fp8"),
        ({"fsdp": "false"}, "line 2, column fsdp: 'false' is not known; there are yes"),
    ],
)
def test_a_row_of_hopper_that_contradicts_itself(tmp_path, capsys, changed, sentence):
    write(tmp_path, "mixtures_h100", [read("mixtures_h100")[0] | changed])
    with pytest.raises(SystemExit):
        paper_tables.main(["--reference", str(tmp_path)])
    assert sentence in capsys.readouterr().err


def test_a_file_that_is_no_table_of_commas_is_a_sentence(tmp_path, capsys):
    path = tmp_path / f"{OF_MEGATRON}.csv"
    write(tmp_path, OF_MEGATRON, [read(OF_MEGATRON)[0]])
    table = path.read_bytes()
    for content, sentence in (
        (table.replace(b",1.42,", b",1,42,"), "line 2: it has more cells than there are columns; quote a cell with a"),
        (table.replace(b",", b";"), "line 2: there is no column num_layers, but model;num_layers;hidden_size"),
        (table.decode().encode("utf-16"), f"{OF_MEGATRON}.csv is not in UTF-8; save it as such"),
    ):
        path.write_bytes(content)
        with pytest.raises(SystemExit):
            paper_tables.main(["--reference", str(tmp_path)])
        assert sentence in capsys.readouterr().err


def test_a_table_of_ones_own_is_predicted_alone(tmp_path, capsys):
    """As a spreadsheet saves it, beside a file that is none of the tables."""
    write(tmp_path, OF_MEGATRON, [read(OF_MEGATRON)[0]])
    path = tmp_path / f"{OF_MEGATRON}.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    write(tmp_path, "mine", [{"gpus": "8"}])
    assert paper_tables.main(["--reference", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("| table | rows |") and "Out of memory" not in printed.out
    assert "Not read, since tools/paper/reference has no table of the name: mine.csv" in printed.err


def test_the_table_on_the_page_is_compared_as_shown_there(tmp_path, capsys):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    section = page.split("### Your own runs against the prediction")[1].split("\n## ")[0]
    table, row = re.search(r"echo '(.*)' >> mine/(.*)\.csv", section).group(2, 1)
    header = (REFERENCE / f"{table}.csv").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / f"{table}.csv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    assert paper_tables.main(["--reference", str(tmp_path)]) == 0
    assert re.search(r"```text\n(.*?)```", section, re.DOTALL).group(1) in capsys.readouterr().out
