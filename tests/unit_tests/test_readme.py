"""The README shows what the code does."""

import re
from pathlib import Path

import pytest

from megatron.seq1f1b.arguments.supported import as_markdown

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.mark.parametrize("name, is_for_readme", [("README.md", True), ("docs/compatibility.md", False)])
def test_the_table_of_features_is_the_one_that_the_code_uses(name, is_for_readme):
    text = (ROOT / name).read_text()
    shown = re.search(r"<!-- features: .*?-->\n(.*?)\n<!-- end of features -->", text, re.DOTALL)
    assert shown[1] == as_markdown(is_for_readme), "run tools/compatibility.py"


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
