"""The search of the documentation finds flags, whose leading dashes its query language reads as operators."""

import subprocess
import sys

import pytest

from support.browser import served
from support.launch import ROOT

LINKS = "[...document.querySelectorAll('#mkdocs-search-results a')].map((each) => each.href)"


def test_a_search_finds_a_flag(page, tmp_path):
    pytest.importorskip("mkdocs")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", tmp_path], cwd=ROOT, check=True)
    with served(tmp_path) as address:
        page.open(f"{address}/index.html?q=--sequence-splits")
        page.wait_for(f"{LINKS}.length > 0")
        assert any("/flags/" in link for link in page.evaluate(LINKS))
        assert not page.problems, page.problems
