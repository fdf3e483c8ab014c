import sys
from pathlib import Path

import pytest

from support.browser import browser
from support.launch import Launcher

# Made by scripts/setup.sh in its environment, away from other packages.
TRANSFORMER_ENGINE = Path(sys.prefix) / "transformer-engine"


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Runs a training script on several ranks, seconds faster than torchrun; see launch.Launcher."""
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def launch_with_te(tmp_path_factory):
    """On ranks that find Transformer Engine's Python, which runs on CPU tensors; see te_double.py."""
    if not (TRANSFORMER_ENGINE / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {TRANSFORMER_ENGINE}: run scripts/setup.sh")
    launcher = Launcher(tmp_path_factory.mktemp("logs"), [TRANSFORMER_ENGINE])
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of Chromium, in which the tests of a file open one address after the other."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page
