"""The README and the tables of docs/ show what the code does."""

import re
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

from compatibility import PAGE, with_table
from functional_tests.equality.suites import groups
from megatron.seq1f1b.arguments import add_arguments

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FEATURES = PAGE.read_text(encoding="utf-8")


def test_the_table_of_what_is_unsupported_is_the_one_of_the_code():
    assert with_table(FEATURES) == FEATURES, "run tools/compatibility.py"


def test_every_supported_feature_names_a_test_that_exists():
    rows = re.findall(r"\| `(tests/[^|:` ]+)(?:::(\w+)| -k ([^`|]+))` \|$", FEATURES, re.MULTILINE)
    supported = FEATURES.partition("## Unsupported")[0]
    ids = " ".join(name for group in groups() for name in group.cases)
    assert len(rows) == supported.count("\n| ") - 1 > 25
    for path, name, cases in rows:
        assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), name
        words = cases.strip("'/").split(" or ") if cases else ()
        assert all(word in ids for word in words), cases


def test_the_page_of_flags_has_every_flag():
    text = (ROOT / "docs" / "flags.md").read_text()
    parser = add_arguments(ArgumentParser(add_help=False))
    flags = {action.option_strings[0] for action in parser._actions if action.help is not SUPPRESS}
    assert len(flags) > 10 and all(f"`{flag}" in text for flag in flags), flags


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130
