import pytest

from support.launch import Launcher


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Runs a training script on several ranks, seconds faster than torchrun; see launch.Launcher."""
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()
