"""How a rehearsal is started, and what it is not started with."""

from argparse import Namespace

import pytest

from megatron.seq1f1b.rehearsal import check_environment, is_asked_for
from megatron.seq1f1b.rehearsal.launch_facts import check


def test_only_the_flag_asks_for_it():
    assert is_asked_for(["--pipeline-model-parallel-size", "8", "--dry-run"])
    assert not is_asked_for(["--dry-run-output", "there"])


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "needs the number of GPUs of the real launch: WORLD_SIZE=64"),
        ({"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "1", "RANK": "0"}, "start it without torchrun"),
        ({"WORLD_SIZE": "8", "RANK": "3"}, "start it without torchrun"),
    ],
)
def test_a_wrong_start_ends_with_one_sentence(environment, sentence):
    with pytest.raises(SystemExit, match=sentence):
        check_environment(environment)
    check_environment({"WORLD_SIZE": "8"})


@pytest.mark.parametrize("flag", ["num_experts", "sft"])
def test_what_follows_from_values_cannot_be_rehearsed(flag):
    check(Namespace(**{flag: None}))
    with pytest.raises(SystemExit, match=f"error: --{flag.replace('_', '-')} .* have no values"):
        check(Namespace(**{flag: 8}))
