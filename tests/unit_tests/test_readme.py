"""The README shows what the code does."""

import re
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

from compatibility import as_markdown
from megatron.seq1f1b.arguments import add_arguments

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_the_table_of_features_is_the_one_that_the_code_uses():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    shown = re.search(r"<!-- features: .*?-->\n(.*?)\n<!-- end of features -->", text, re.DOTALL)
    assert shown[1] == as_markdown(), "run tools/compatibility.py"


def test_the_page_of_flags_has_every_flag():
    text = (ROOT / "docs" / "flags.md").read_text()
    parser = add_arguments(ArgumentParser(add_help=False))
    flags = {action.option_strings[0] for action in parser._actions if action.help is not SUPPRESS}
    assert len(flags) > 10 and all(f"`{flag}" in text for flag in flags), flags


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
