"""Flags by the names of their values."""

import upstream_flags
from megatron.seq1f1b.process import flag_names
from megatron.seq1f1b.process.flag_names import flag_of, values_by_flag


def test_a_flag_has_dashes_where_its_name_has_underscores():
    assert flag_of("num_layers") == "--num-layers" and flag_of("save") == "--save"


def test_flags_named_unlike_their_values_are_megatrons():
    known = upstream_flags.considered()
    for name in flag_names._SPELLED:
        assert flag_of(name) in known and f"--{name.replace('_', '-')}" not in known


def test_values_come_with_the_flag_before_them():
    words = ["plan.sh", "--gpus", "64", "--lengths=a=b", "more", "--overlap", "--machine="]
    found = [("", "plan.sh"), ("--gpus", "64"), ("--lengths", "a=b"), ("--lengths", "more"), ("--machine", "")]
    assert list(values_by_flag(words)) == found
