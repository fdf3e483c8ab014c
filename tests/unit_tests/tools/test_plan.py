"""The commands `seq1f1b plan` and `seq1f1b train-time`: what a user sees."""

import struct
from types import SimpleNamespace

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands import plan, plan_text
from megatron.seq1f1b.commands.parsing import read_histogram
from megatron.seq1f1b.planning.costs.machine import read_machine

SMALL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --seq-length 8192 --global-batch-size 4"


def test_a_launch_is_planned_predicted_as_it_is_and_explained(tmp_path, capsys):
    """Where Megatron alone does as well, its flags come first."""
    launch = f"{SMALL} --best 2 --explain --output {tmp_path}/frontier.png --pipeline-model-parallel-size 4 --lr 1e-4"
    assert commands.main(["plan", *launch.split()]) == 0
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "rank  0" in printed and "Where the time goes" in printed
    assert "as given" in printed and "As given it fits, and takes " in printed
    assert "Use Megatron's own schedules: they take " in printed and "(within error)." in printed
    flags, ours = printed[printed.index("Flags of Megatron's own schedules:") :].split("Runner-up: this package, in ")
    assert "--lr 1e-4" in flags and "--num-layers 8" in flags and flags.count("--global-batch-size") == 1
    assert "--pipeline-schedule" in ours and not any(
        f"--{name}" in flags for name in ("pipeline-schedule", "sequence-split", "keep-logits", "partition-state")
    )


@pytest.mark.parametrize("more, is_partitioned", [("", True), ("--log-params-norm", False)])
def test_a_partitioned_state_is_planned_unless_a_flag_forbids_it(capsys, more, is_partitioned):
    words = "--num-layers 24 --hidden-size 1024 --num-attention-heads 8 --group-query-attention --num-query-groups 1"
    words += " --vocab-size 1024 --gpus 8 --seq-length 2048 --global-batch-size 16"
    words += f" --device-memory 2.7 --host-memory 0 --best 1 {more}"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert ("\n  --partition-state" in printed) == ("breadth-first, shares" in printed) == is_partitioned


def test_what_a_prediction_ignores_is_listed_and_comes_back(capsys):
    words = "--gpus 1 --seq-length 2048 --global-batch-size 1 --model 2.7b"
    words += " --lr 1e-4 --foo --fp8-format hybrid --eval-global-batch-size 4"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    flags = printed[printed.index("Flags of ") : printed.index("Runner-up")]
    assert "--lr 1e-4 \\" in flags and "--foo \\" in flags and flags.count("--bf16") == 1
    assert "--fp8-format is not modelled" in printed
    assert "change no prediction: --lr 1e-4, --foo, --fp8-format hybrid, --eval-global-batch-size 4." in printed


def test_plans_with_different_parts_are_explained(monkeypatch):
    parts = iter([{"attention": 1.0}, {"attention": 1.5, "tensor-parallel collectives": 2.0}])
    monkeypatch.setattr(plan_text, "breakdown", lambda prediction: next(parts))
    plans = [SimpleNamespace(prediction=None)] * 2
    lines = plan_text.explained(plans).splitlines()
    assert "  tensor-parallel collectives                    0.0    2000.0   +2000.0" in lines
    assert lines[-1].endswith("spends most of its difference on: tensor-parallel collectives.")


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
    assert "--pipeline-schedule" in printed[printed.index("Flags of the best:") :] and "Runner-up" not in printed
    assert "--pipeline-schedule" in seen


LENGTHS = "tokens,sequences\n100,50\n\n# documents\n1500,10\n8192,1\n"


def test_a_histogram_of_lengths_has_a_plan_in_units(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    words = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --gpus 4 --global-batch-size 64 --best 2"
    words += f" --lengths {tmp_path / 'lengths.csv'} --pipeline-model-parallel-size 4 --unit-tokens 2048 --sft"
    assert commands.main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "61 sequences of 100 to 8,192 tokens, " in printed and "8192 packs" in printed and "as given" in printed
    assert "Units gain " in printed and "rank  0" in printed
    flags = printed[printed.index("Flags of ") :].split()
    assert flags.count("--unit-tokens") == flags.count("--calculate-per-token-loss") == flags.count("--sft") == 1
    assert flags[flags.index("--seq-length") + 1] == "8192" and "--sequence-splits" not in flags


def test_lengths_of_a_corpus_and_mistakes_in_a_file(tmp_path):
    index = tmp_path / "corpus.idx"
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 4)
    index.write_bytes(header + struct.pack("<3i3q4q", 5, 9, 5, 0, 10, 28, 0, 1, 2, 3))
    assert read_histogram(index) == {5: 2, 9: 1}
    for damaged in (header, index.read_bytes()[: len(header) + 6], header + struct.pack("<3i", 5, -9, 5)):
        index.write_bytes(damaged)
        with pytest.raises(ValueError, match="corpus.idx is cut off, damaged or without tokens; make the corpus again"):
            read_histogram(index)
    text = tmp_path / "lengths.txt"
    text.write_text("\ufeff7\n7 2\n", encoding="utf-8")  # as spreadsheets write it
    assert read_histogram(text) == {7: 3}
    for mistake, sentence in (
        ("tokens,sequences\n5,-1", "line 2: '5,-1' is not"),
        ("tokens", "has no lengths"),
        ("1,2,3", "line 1: '1,2,3' is not"),
        ("7,2\n99999999999,1", "line 2: no sequence has 99999999999 tokens"),
    ):
        text.write_text(mistake)
        with pytest.raises(ValueError, match=sentence):
            read_histogram(text)


def test_the_table_the_law_and_the_flags_are_shown(capsys):
    words = "--parameters 1e8 --tokens 1e9 --seq-length 2048 --gpus 1 --gpu-hour 2 --critical-batch-size 65536"
    assert commands.main(["train-time", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "Largest batch: 0.0655 million tokens (as given; tokens by arXiv 2410.21676" in printed
    assert "GPU hours" in printed and "cost" in printed and "--micro-batch-size" in printed
