"""No flag of Megatron goes unnoticed: each that our schedules do not support has a row in the table."""

import upstream_flags


def test_every_flag_of_the_installed_megatron_was_considered():
    assert upstream_flags.unknown() == []


def test_a_new_flag_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(upstream_flags, "CONSIDERED", tmp_path / "known.csv")
    upstream_flags.write({flag: "1" for flag in upstream_flags.flags() if flag != "--num-layers"})
    monkeypatch.setattr("sys.argv", ["upstream_flags.py"])
    assert upstream_flags.main() == 1 and capsys.readouterr().out == "--num-layers\n"
    monkeypatch.setattr("sys.argv", ["upstream_flags.py", "--write"])
    assert upstream_flags.main() == 0 and upstream_flags.unknown() == []
    assert upstream_flags.considered()["--data-path"] == "*" and upstream_flags.considered()["--bf16"] == "0"
