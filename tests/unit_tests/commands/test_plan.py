"""The commands `seq1f1b plan`, `gain-map` and `train-time`: what a user sees, and the laws of the batch."""

import gc
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands import gain_map, plan, plan_text
from megatron.seq1f1b.commands.gain_cells import read_cells
from megatron.seq1f1b.commands.model_flags import model_of, preset
from megatron.seq1f1b.commands.parsing import output_path
from megatron.seq1f1b.commands.plan_answer import Answer
from megatron.seq1f1b.commands.train_time import LAWS, soonest
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.training_setup import Fsdp, TrainingSetup
from megatron.seq1f1b.files.lengths import read_histogram
from megatron.seq1f1b.planner import breakdown, search
from megatron.seq1f1b.planner.gain import Gain
from megatron.seq1f1b.planner.search import Search
from megatron.seq1f1b.planner.unit_search import draw, in_bins
from megatron.seq1f1b.report import plan_figures
from megatron.seq1f1b.schedule import Placement
from unit_tests.planner.question import MODEL, small

SMALL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --seq-length 8192 --global-batch-size 4"


def flags_of_sides(printed):
    """The flags of Megatron's own schedules and of this package, as a plan prints them; None for the same layout."""
    shared, *sides = re.split("\n[+] ", printed[printed.index("Flags of") :])
    named = dict(side.split(",", 1) for side in sides)
    if not named:
        return shared, None
    return f"{shared}\n{named["Megatron's own schedules"]}", f"{shared}\n{named['this package']}"


def test_a_launch_is_planned_predicted_as_it_is_and_explained(tmp_path, monkeypatch, capsys):
    """Where Megatron alone does as well, its flags come first, and the picture has it."""
    plot_frontier = plan_figures.plot_frontier
    drawn = []

    def plot_and_keep(groups, marked, *others):
        drawn.append(marked)
        plot_frontier(groups, marked, *others)

    monkeypatch.setattr(plan_figures, "plot_frontier", plot_and_keep)
    launch = f"{SMALL} --best 2 --explain --output {tmp_path}/frontier.png --pipeline-model-parallel-size 4 --lr 1e-4"
    assert commands.main(["plan", *launch.split()]) == 0
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    throughput, of_launch = (
        float(next(line for line in printed.splitlines() if line.startswith(name)).removeprefix(name).split()[1])
        for name in ("Megatron", "as given")
    )
    (marked,) = drawn
    assert {*marked} == {"advised", "Megatron's own", "as given"}
    assert marked["advised"].throughput == pytest.approx(throughput, rel=1e-3) and marked["advised"].name
    for words in ("tokens/s", "rank  0", "Where the time goes", "as given"):
        assert words in printed
    longer = float(re.search(r"As given it fits, and takes (.*) % longer than what is advised.", printed)[1])
    assert longer == pytest.approx(100 * (throughput / of_launch - 1), abs=0.1)
    assert "Use Megatron's own schedules: they take " in printed and "than predictions are off in the mean" in printed
    flags, ours = flags_of_sides(printed)
    assert "--lr 1e-4" in flags and "--num-layers 8" in flags and flags.count("--global-batch-size") == 1
    of_ours = ("--pipeline-schedule", "--sequence-split", "--keep-logits", "--partition-state")
    assert ours is not None and "--use-megatron-fsdp" in flags and "--use-megatron-fsdp" not in ours
    assert not any(flag in flags for flag in of_ours)


def test_one_layout_of_both_sides_is_printed_once(monkeypatch, capsys):
    monkeypatch.setattr(Search, "megatron_baseline", lambda search: search.best(1)[0])
    assert commands.main(["plan", *SMALL.split(), "--best", "1"]) == 0
    printed = capsys.readouterr().out
    assert flags_of_sides(printed)[1] is None and printed.count("has the same layout.") == 1


@pytest.mark.parametrize("more, is_partitioned", [("", True), ("--log-params-norm", False)])
def test_a_partitioned_state_is_planned_unless_a_flag_forbids_it(capsys, more, is_partitioned):
    words = "--num-layers 24 --hidden-size 1024 --num-attention-heads 8 --group-query-attention --num-query-groups 1"
    words += " --vocab-size 1024 --gpus 8 --seq-length 2048 --global-batch-size 16"
    words += f" --device-memory 2.7 --host-memory 0 --best 1 {more}"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert ("\n  --partition-state" in printed) == ("breadth-first, shares" in printed) == is_partitioned


def test_the_objects_of_a_plan_are_hardly_looked_through(capsys):
    """Where Python looks for cycles as often as usual, that is half of the time of a large plan."""
    gc.set_threshold(700, 10, 10)  # Python's own
    before = sum(each["collections"] for each in gc.get_stats())
    assert commands.main(["plan", *SMALL.split(), "--best", "1"]) == 0
    assert sum(each["collections"] for each in gc.get_stats()) - before < 100


def test_a_pattern_is_a_number_of_layers_too():
    """Megatron takes --hybrid-layer-pattern without --num-layers."""
    words = "--hybrid-layer-pattern *-|*-| --hidden-size 64 --num-attention-heads 4 --gpus 2 --seq-length 1024"
    args = plan.parse([*words.split(), "--global-batch-size", "4"])
    assert model_of(args.launch).num_layers == 4


def test_what_every_run_refuses_is_in_no_plan(capsys):
    """Megatron's own schedules included: it saves no prediction heads with tied embeddings from several ranks."""
    words = f"{SMALL} --best 2 --mtp-num-layers 1 --save here"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "Plans with several pipeline ranks are left out: --mtp-num-layers with tied embeddings" in printed
    assert {*re.findall("--pipeline-model-parallel-size ([0-9]+)", printed)} == {"1"}


def test_nothing_fits_for_what_the_flags_exclude(capsys):
    """With several pipeline ranks it would fit, and more memory is not the answer."""
    words = "--num-layers 32 --hidden-size 1024 --num-attention-heads 1 --gpus 4 --seq-length 2048"
    words += " --global-batch-size 4 --best 1 --mtp-num-layers 1 --save here --host-memory 0 --device-memory 5"
    assert commands.main(["plan", *words.split()]) != 0
    sentence = capsys.readouterr().err
    assert "needs what the flags of the launch exclude" in sentence
    assert "--mtp-num-layers with tied embeddings" in sentence


def test_plans_of_both_sides_say_why_one_wins_and_are_json(tmp_path, capsys):
    """Flags that both have come once; together with those of a side they are its flags in the file."""
    words = "--model 30b --gpus 64 --machine a100-seq1f1b --seq-length 65536 --global-batch-size 16 --host-memory 0"
    assert commands.main(["plan", *words.split(), "--best", "1", "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    answer = json.loads((tmp_path / "plan.json").read_text())
    megatron, ours = flags_of_sides(printed)
    for answered, side in ((answer["megatron"], megatron), (answer["plans"][0], ours)):
        assert sorted(answered["flags"]) == sorted(re.findall(r"(?m)^  (--.*?)(?: \\)?$", side))
    rate = answer["plans"][0]["tokens_per_second"] / answer["megatron"]["tokens_per_second"]
    assert answer["gain"] == pytest.approx(rate - 1)
    assert "GPU hours with this package" in printed and "The largest part of the difference: " in printed


def test_a_search_that_ended_early_says_so(monkeypatch, tmp_path, capsys):
    """The limit is a plan that gains more than the error: none does here, so that a good one is enough."""
    monkeypatch.setattr(search, "_ALONE", 10)
    words = [*SMALL.split(), "--best", "1", "--json", str(tmp_path / "plan.json")]
    assert commands.main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    answer = json.loads((tmp_path / "plan.json").read_text())
    least = answer["least_step_seconds"]
    (plan_of_ours,) = answer["plans"]
    assert answer["gain"] < answer["error"]
    assert answer["megatron"]["step_seconds"] / (1 + answer["error"]) <= least < plan_of_ours["step_seconds"]
    assert "The search for the best plan of this package ended early." in printed
    assert f"none takes less than {least:.3f} s" in printed


def test_what_would_help_is_known_by_the_names_of_parts():
    setup = TrainingSetup(preset("7b"), 2048, num_microbatches=2, placement=Placement(2))
    named = breakdown.breakdown(predict(setup, read_machine("a100-80gb")))
    assert {*plan_text._CURES} <= {*named, *breakdown._OF_LAYERS}


def test_what_a_prediction_ignores_is_listed_and_comes_back(capsys):
    words = "--gpus 1 --seq-length 2048 --global-batch-size 1 --model 2.7b"
    words += " --lr 1e-4 --foo --save-intervall 9 --fp8-format hybrid --eval-global-batch-size 4 --dry-run"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    flags, _ = flags_of_sides(printed)
    assert "--lr 1e-4 \\" in flags and "--foo \\" in flags and flags.count("--bf16") == 1
    assert "--fp8-format is not modelled" in printed
    assert "\n--foo is no flag of Megatron" in printed and "--lr is no flag" not in printed
    assert "--save-intervall is no flag of Megatron: did you mean --save-interval?\n" in printed
    assert "change no prediction: --lr, --foo, --save-intervall, --fp8-format, --eval-global-batch-size" in printed


def test_plans_with_different_parts_are_explained(monkeypatch):
    parts = iter([{"attention": 1.0}, {"attention": 1.5, "recomputation": 2.0}])
    monkeypatch.setattr(plan_text, "breakdown", lambda prediction: next(parts))
    *_, more, last = plan_text.explained([SimpleNamespace(prediction=None)] * 2).splitlines()
    assert more.split() == ["recomputation", "0.0", "2000.0", "+2000.0"]
    assert last.endswith("spends most of its difference on: recomputation.")


def test_a_rehearsal_has_the_memory_of_the_whole_device(monkeypatch, tmp_path, capsys):
    """It takes off what lies outside the allocator itself. Flags of segments that gain are printed and rehearsed."""
    monkeypatch.setattr(plan_text.Gain, "is_of_segments", True)
    script, seen = tmp_path / "pretrain.py", []
    script.write_text("")
    run = lambda command, env: seen.extend(command) or SimpleNamespace(returncode=0)  # noqa: E731
    monkeypatch.setattr(plan.subprocess, "run", run)
    assert commands.main(["plan", *SMALL.split(), "--best", "1", "--rehearse", str(script)]) == 0
    memory = float(seen[seen.index("--device-memory") + 1])
    assert memory == pytest.approx(read_machine("a100-80gb").device.memory_gib)
    printed = capsys.readouterr().out
    assert "--pipeline-schedule" in flags_of_sides(printed)[1]
    assert "--pipeline-schedule" in seen


@pytest.mark.parametrize("needs_gpus", [{"fsdp": Fsdp.PARAMETERS}, {"context_parallel": 2, "cp_comm_type": "p2p"}])
def test_what_needs_gpus_is_not_rehearsed(needs_gpus):
    """Of the two plans, that of this package is rehearsed in place of Megatron's."""
    plain = {"data_parallel": 4, "distributed_optimizer": True}
    setups = [TrainingSetup(MODEL, 8192, 4, **plain | choices) for choices in ({}, needs_gpus)]
    ours, megatron = (SimpleNamespace(prediction=SimpleNamespace(setup=setup)) for setup in setups)
    slower = SimpleNamespace(is_of_segments=False)
    assert Answer([ours], 0.0, megatron, None, slower).rehearsable is ours
    assert Answer([megatron], 0.0, ours, None, slower).rehearsable is ours


LENGTHS = "tokens,sequences\n100,50\n\n# documents\n1500,10\n8192,1\n"


def test_a_histogram_of_lengths_has_a_plan_in_units(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    words = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --global-batch-size 64 --best 2"
    words += f" --lengths {tmp_path / 'lengths.csv'} --pipeline-model-parallel-size 4 --unit-tokens 2048 --sft"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "61 sequences of 100 to 8,192 tokens, " in printed and "8192 packs" in printed and "as given" in printed
    assert "Use Megatron's own schedules on packs as long as the longest sequence, " in printed and "rank  0" in printed
    megatron, ours = flags_of_sides(printed)
    assert "--unit-tokens" not in megatron and "--pipeline-schedule" not in megatron
    flags = ours.split()
    assert flags.count("--unit-tokens") == flags.count("--calculate-per-token-loss") == 1
    assert flags[flags.index("--seq-length") + 1] == "8192" and "--sequence-splits" not in flags


def test_a_preset_is_planned_in_units_without_its_heads(tmp_path):
    """Units refuse heads that predict further tokens."""
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    words = f"--model deepseek-v3 --gpus 8 --global-batch-size 64 --lengths {tmp_path / 'lengths.csv'}".split()
    args = plan.parse(words)
    assert args.leaves_heads_out and plan.launch_rules(args.launch, in_units=True)
    assert "--mtp-num-layers" not in " ".join(args.launch.passed_through)
    assert not plan.parse([*words, "--model", "llama3-8b"]).leaves_heads_out


def test_many_different_lengths_are_drawn_as_few():
    """As many tokens, and the longest as it is."""
    many = {length: 1 + length % 7 for length in range(1, 60_001)}
    few = in_bins(many)
    assert len(few) < 140 and max(few) == 60_000 and sum(few.values()) == sum(many.values())
    tokens = [sum(length * count for length, count in each.items()) for each in (many, few)]
    assert tokens[0] == pytest.approx(tokens[1], rel=1e-3)
    assert in_bins({100: 50, 1500: 10, 8192: 1}) == {100: 50, 1500: 10, 8192: 1}
    assert len(set(draw(few, 512)[0])) < 140


INDEX = struct.pack("<9sQBQQ3i3q4q", b"MMIDIDX\x00\x00", 1, 4, 3, 4, 5, 9, 5, 0, 10, 28, 0, 1, 2, 3)


@pytest.mark.parametrize("content, found", [(INDEX, {5: 2, 9: 1}), ("\ufeff7\n7 2\n".encode(), {7: 3})])
def test_lengths_of_a_corpus_and_of_a_spreadsheet(tmp_path, content, found):
    (tmp_path / "lengths").write_bytes(content)
    assert read_histogram(tmp_path / "lengths") == found


def test_the_soonest_training_is_shown_with_its_law_and_flags(capsys):
    words = "train-time --model 2.7b --tokens 1e9 --seq-length 2048 --gpus 1"
    assert commands.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "2.69 B parameters; largest batch: 0.302 million tokens (arXiv 2410.21676)" in printed
    assert "GPU hours" in printed and "--micro-batch-size" in printed


@pytest.mark.parametrize("ours, words", [(1.5, "+50.0 %"), (1.05, "+5.0 % (within error)"), (0.8, "-20.0 %")])
def test_a_gain_below_the_error_is_printed_as_such(ours, words):
    assert str(Gain(ours, 1.0, 0.08)) == words


@pytest.mark.parametrize(
    "ours, words",
    [
        (1.5, "Megatron's own schedules take 2.000 s a step: this package is 50.0 % faster."),
        (1.05, "this package is 5.0 % faster, which is less than predictions are off in the mean (8.0 %)."),
        (0.8, "Use Megatron's own schedules: they take 2.000 s a step, and the best plan of this package is 20.0 %"),
        (None, "Use Megatron's own schedules: they take 2.000 s a step, and no plan of this package fits."),
    ],
)
def test_the_verdict_says_which_side_is_faster(ours, words):
    megatron = SimpleNamespace(seconds=2.0)
    assert words in plan_text.verdict(Gain(ours, 1.0, 0.08), megatron)


@pytest.mark.parametrize(
    "ours, words",
    [
        (1.5, "Units are 50.0 % faster than Megatron's own schedules on packs as long as the longest sequence."),
        (0.8, "2 a step: units are 20.0 % slower."),
        (None, "2 a step: no plan of units fits."),
    ],
)
def test_the_verdict_on_units_says_which_side_is_faster(ours, words):
    setup = SimpleNamespace(global_batch_size=2)
    megatron = SimpleNamespace(seconds=2.0, candidate=SimpleNamespace(setup=setup))
    assert words in plan_text.verdict_on_units(Gain(ours, 1.0, 0.08), megatron)


def test_a_gain_over_nothing_names_what_fits():
    found = [str(Gain(ours, megatron, 0.08)) for ours, megatron in ((1.0, None), (None, 1.0), (None, None))]
    assert found == ["only segments fit", "only Megatron's own fit", "nothing fits"]


MAP = "--model llama3-8b --seq-length 8192 --machine a100-80gb --gpus 2 4 --tokens 16384 32768 --bandwidths 10 100"


def test_a_map_is_continued_where_it_was_left(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    computed = []

    def of_small(asked):
        computed.append((round(asked.machine.network.bandwidth / 1e9), asked.num_devices, asked.global_batch_size))
        return Search(replace(asked, model=MODEL, chunks=(1,), micro_batches=(1,), segments=(1, 2)))

    monkeypatch.setattr(gain_map, "Search", of_small)
    output = tmp_path / "gains.csv"
    gain_map.main([*MAP.split(), "--output", str(output), "--picture"])
    cells = [(speed, count, batch) for speed in (10, 100) for count in (2, 4) for batch in (2, 4)]
    assert computed == cells
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1 + 8 and " %" in first
    assert output.with_suffix(".png").stat().st_size > 10_000

    content, lines = output.read_bytes(), output.read_bytes().splitlines(keepends=True)
    complete = b"".join(lines[:-1])
    for left in (complete, complete + lines[-1][:30], complete + lines[-1].rstrip()):
        output.write_bytes(left)
        gain_map.main([*MAP.split(), "--output", str(output)])
        assert computed[8:] == [(100, 4, 4)] and capsys.readouterr().out == first
        assert output.read_bytes() == content
        del computed[8:]


def test_a_map_has_a_cell_for_each_link_to_the_host(tmp_path, monkeypatch, capsys):
    asked_for = []

    def of_small(asked):
        asked_for.append((asked.machine.device.host_bandwidth, asked.host_gib))
        return Search(replace(asked, model=MODEL, chunks=(1,), micro_batches=(1,), segments=(1, 2)))

    monkeypatch.setattr(gain_map, "Search", of_small)
    output = tmp_path / "gains.csv"
    sizes = "--model llama3-8b --seq-length 8192 --machine h100-80gb --gpus 2 --tokens 16384"
    gain_map.main([*sizes.split(), "--host-bandwidths", "50", "0", "--output", str(output)])
    gain_map.main([*sizes.split(), "--output", str(output)])
    assert asked_for == [(50e9, 200), (0, 0), (30e9, 200)]
    assert [cell.host_bandwidth for cell in read_cells(output)] == [50, 0, 30]
    assert "to the host" in capsys.readouterr().out


@pytest.mark.parametrize("left", [b"", b"model,mach"], ids=["nothing", "half of the first line"])
def test_a_map_goes_on_that_was_killed_in_its_first_cell(tmp_path, left):
    (tmp_path / "gains.csv").write_bytes(left)
    assert read_cells(tmp_path / "gains.csv") == []


def test_an_output_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "later.csv")
    assert output_path(".csv")(str(tmp_path / "link.csv")) == tmp_path / "link.csv"
    assert (tmp_path / "link.csv").is_symlink() and not (tmp_path / "later.csv").exists()


def test_ranks_may_try_the_same_output_at_once(tmp_path, monkeypatch):
    """As under torchrun: another rank has removed the file that both made."""
    opened = Path.open

    def removed_at_once(path, mode):
        file = opened(path, mode)
        path.unlink()
        return file

    monkeypatch.setattr(Path, "open", removed_at_once)
    assert output_path(".toml")(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"


@pytest.mark.parametrize(
    "law, parameters, tokens, least, most",
    [
        # The authors' 1.2B on 24.6e9 tokens of 512 each: a batch of 2048 takes less than 20 % more tokens than one of
        # 256, one of 4096 takes more (their plots/chinchilla.ipynb).
        ("tokens", 1.2e9, 187500 * 256 * 512, 2048 * 512, 4096 * 512),
        # Twice as large for every 13 % of loss (arXiv 2001.08361, equation 1.4).
        ("noise-scale", 1.5e9, 22e9, 2e8 / 2.6 ** (1 / 0.21), 2e8 / 2.2 ** (1 / 0.21)),
        ("olmo", 1e9, 100e9, 1024 * 4096, 1024 * 4096),
        ("olmo", 1e9, 336e9, 1536 * 4096, 1536 * 4096),
        ("olmo", 1e9, 2e12, 2048 * 4096, 4096 * 4096),
        ("three-term", 1e9, 1e11, 2 * 1.1e6, 2 * 1.14e6),
    ],
)
def test_the_largest_batch_is_that_of_the_published_law(law, parameters, tokens, least, most):
    assert least <= LAWS[law].largest(parameters, tokens) <= most


def test_the_three_term_law_is_flat_around_its_optimum():
    assert [LAWS["three-term"].overhead(share) for share in (1, 0.5, 0.25)] == pytest.approx([1.05, 1.0, 1.05])


def test_more_devices_train_sooner_and_take_more_hours():
    one = {"chunks": (1,), "segments": (1,), "micro_batches": (1,), "families": ("1f1b",)}
    asked = (small(num_devices=count, sequence_length=2048, **one) for count in (4, 16))
    few, many = (soonest(each, 1e9, LAWS["tokens"], 16 * 2048, shares=(1.0,)) for each in asked)
    assert many[0] < few[0] and 16 * many[0] >= 0.99 * 4 * few[0]
    steps = 86400 * few[0] / few[1].seconds
    assert steps * 16 * 2048 == pytest.approx(1.2e9) and few[1].memory_gib <= 16
    assert soonest(small(memory_gib=0.1), 1e9, LAWS["olmo"], 16 * 2048, shares=(1.0,)) is None
