import pytest

from support.browser import browser
from support.launch import Launcher


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Runs a training script on several ranks, seconds faster than torchrun; see launch.Launcher."""
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of Chromium, in which the tests of a file open one address after the other."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page
