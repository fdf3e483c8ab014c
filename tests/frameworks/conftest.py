import pytest

from support.launch import Launcher


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Ranks that have imported Megatron before a framework does."""
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()
