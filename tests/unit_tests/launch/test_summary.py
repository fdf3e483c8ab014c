"""The block at the start."""

import pytest

from megatron.seq1f1b import validate
from megatron.seq1f1b.launch.summary import copies_summary
from unit_tests.arguments.parsed import parsed

SIZES = {"pipeline_model_parallel_size": 8, "global_batch_size": 16, "data_parallel_size": 1, "seq_length": 32768}


def test_the_block_tells_what_runs_beside_megatrons_own(capsys, monkeypatch):
    config = validate(parsed("--sequence-splits", "4", bf16=True, **SIZES))
    title, *block = capsys.readouterr().out.splitlines()
    assert title == "-- sequence-level pipeline parallelism"
    rows = {name: text.strip() for name, text in (row.strip().split("  ", 1) for row in block)}
    assert rows["schedule"] == "1f1b with segments" and rows["pipeline"] == "8 ranks, 8 micro-batches"
    assert rows["segments"] == f"4, balanced: {' '.join(map(str, config.lengths))} tokens"
    ours, own = (float(words.split(" %")[0]) for words in rows["predicted bubble"].split(";"))
    # With equal stages (P - 1) / (m k + P - 1) and (P - 1) / (m + P - 1); the head makes the last one longer.
    assert 100 * 7 / 39 < ours < 100 * 7 / 15 < own < 100
    assert "GiB" in rows["predicted activations"] and "flash attention for CPUs" in rows["attention"]
    monkeypatch.setenv("RANK", "1")
    validate(parsed("--sequence-splits", "4", bf16=True, **SIZES))
    assert capsys.readouterr().out == ""


def test_a_measured_link_is_beside_the_rate_that_units_need():
    """A unit leaves while its forward runs."""

    def rows(rate: float, **settings: bool) -> list[str]:
        config = validate(parsed("--sequence-splits", "4", "--offload-activations", "0.5", **SIZES, **settings))
        return copies_summary(config, config.partition.costs, rate).splitlines()

    block = rows(50e9, bf16=True)
    assert block[0] == "-- activations to the memory of the host, and back"
    assert block[1].startswith("   link    50 GB/s each way")
    need, in_32_bits = (float(lines[2].split()[1]) for lines in (block, rows(50e9)))
    assert 0 < need < 50 and in_32_bits == pytest.approx(2 * need, rel=0.01)


@pytest.mark.parametrize(
    "flags, settings, row",
    [
        (["--offload-activations", "0.5"], {}, "host memory            50 % of the activations that a rank would hold"),
        ([], {"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "the gains of --fp8-format: predictions are for 16 bits"),
    ],
)
def test_the_block_names_what_moves_and_what_is_not_predicted(capsys, flags, settings, row):
    validate(parsed("--sequence-splits", "4", *flags, **settings, **SIZES))
    assert row in capsys.readouterr().out
    validate(parsed("--sequence-splits", "4", bf16=True, **SIZES))
    assert row not in capsys.readouterr().out
    validate(parsed())  # Megatron's own schedule
    assert capsys.readouterr().out == ""
