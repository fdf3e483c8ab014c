"""Flags by the names of their values."""

import upstream_flags
from megatron.seq1f1b.process import flag_names
from megatron.seq1f1b.process.flag_names import flag_of


def test_a_flag_has_dashes_where_its_name_has_underscores():
    assert flag_of("num_layers") == "--num-layers" and flag_of("save") == "--save"


def test_flags_named_unlike_their_values_are_megatrons():
    known = upstream_flags.considered()
    for name in flag_names._SPELLED:
        assert flag_of(name) in known and f"--{name.replace('_', '-')}" not in known
