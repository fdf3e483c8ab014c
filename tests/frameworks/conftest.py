import pytest

from support.launch import ROOT, Launcher

# Made by scripts/setup.sh; the kernels have a double (support/te_double.py).
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Ranks that have imported Megatron before a framework does."""
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def launch_with_te(tmp_path_factory):
    """The same for frameworks that build layers of Transformer Engine's."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("HF_HUB_OFFLINE", "1")
        launcher = Launcher(tmp_path_factory.mktemp("logs"), [TRANSFORMER_ENGINE])
    yield launcher
    launcher.close()
