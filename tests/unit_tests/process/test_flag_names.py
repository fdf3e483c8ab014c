"""Flags by the names of their values."""

from megatron.seq1f1b.process.flag_names import flag_of


def test_a_flag_has_dashes_where_its_name_has_underscores():
    assert flag_of("num_layers") == "--num-layers" and flag_of("save") == "--save"
