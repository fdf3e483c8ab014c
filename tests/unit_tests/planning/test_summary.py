"""The block at the start."""

import pytest

from megatron.seq1f1b import validate
from megatron.seq1f1b.planning.summary import copies_summary
from unit_tests.arguments.parsed import parsed

SIZES = {"pipeline_model_parallel_size": 8, "global_batch_size": 16, "data_parallel_size": 1, "seq_length": 32768}


@pytest.mark.parametrize("rank, blocks", [("0", 1), ("1", 0)])
def test_the_block_tells_what_runs_beside_megatrons_own(capsys, monkeypatch, rank, blocks):
    monkeypatch.setenv("RANK", rank)
    config = validate(parsed("--sequence-splits", "4", bf16=True, **SIZES))
    block = capsys.readouterr().out
    assert block.count("-- sequence-level pipeline parallelism") == blocks
    if blocks:
        rows = dict(row.strip().split("  ", 1) for row in block.splitlines()[1:])
        assert rows["schedule"].strip() == "1f1b with segments"
        assert rows["pipeline"].strip() == "8 ranks, 8 micro-batches"
        assert rows["segments"].strip() == f"4, balanced: {' '.join(map(str, config.lengths))} tokens"

        ours, own = (float(words.split(" %")[0].split()[-1]) for words in rows["predicted bubble"].split("1F1B"))
        # With equal stages (P - 1) / (m k + P - 1) and (P - 1) / (m + P - 1); the head makes the last one longer.
        assert 100 * 7 / 39 < ours < 100 * 7 / 15 < own < 100
        assert "GiB" in rows["predicted activations"] and "flash attention for CPUs" in rows["attention"]


def test_a_measured_link_tells_what_of_the_copies_hides():
    """All of it at the rate that is printed for the units; of a link that is a thousand times slower, hardly any."""
    config = validate(parsed("--sequence-splits", "4", "--offload-activations", "0.5", bf16=True, **SIZES))

    def rows(rate: float) -> dict[str, str]:
        block = copies_summary(config, config.partition.costs, rate).splitlines()
        assert block[0] == "-- activations to the memory of the host, and back"
        return {name: text.strip() for name, text in (row[3:].split("  ", 1) for row in block[1:])}

    fast = rows(50e9)
    assert fast["link"].startswith("50 GB/s each way")
    need = float(fast["predicted units"].split()[-2])
    assert 0 < need < 50 and "a step 0.0 % longer" in fast["predicted copies"]
    assert rows(1.01e9 * need)["predicted copies"] == fast["predicted copies"]
    assert float(rows(1e6 * need)["predicted copies"].split()[0]) < 5


def test_a_measured_link_where_no_unit_moves():
    config = validate(parsed("--pipeline-schedule", "1f1b", "--offload-activations", "1", bf16=True))
    assert copies_summary(config, config.partition.costs, 1e9).endswith(
        "none moves: all go backward soon after their forward"
    )


@pytest.mark.parametrize(
    "flags, settings, row",
    [
        (["--recompute-keeps-attention"], {"recompute_granularity": "full"}, "all of a layer but its attention"),
        (["--offload-activations", "0.5"], {}, "host memory            50 % of the activations that a rank would hold"),
        ([], {"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "the gains of --fp8-format: predictions are for 16 bits"),
    ],
)
def test_the_block_names_what_is_recomputed_and_not_predicted(capsys, flags, settings, row):
    validate(parsed("--sequence-splits", "4", *flags, **settings, **SIZES))
    assert row in capsys.readouterr().out
    validate(parsed("--sequence-splits", "4", bf16=True, **SIZES))
    assert row not in capsys.readouterr().out
    validate(parsed())  # Megatron's own schedule
    assert capsys.readouterr().out == ""
