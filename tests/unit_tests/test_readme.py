"""The README shows what the code does."""

import re
from pathlib import Path

from megatron.seq1f1b.arguments.supported import as_markdown

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_table_of_features_is_the_one_that_the_code_uses():
    shown = re.search(r"<!-- features: .*?-->\n(.*?)\n<!-- end of features -->", README.read_text(), re.DOTALL)
    assert shown[1] == as_markdown()


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
