"""Which versions of Megatron are taken, and what is said of those before their release."""

import pytest
from megatron.core import package_info
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron.seq1f1b.process.megatron_versions import (
    TRIED,
    check_version,
    displaces_padded_buckets,
    scan_of_mamba,
)


def test_an_old_megatron_is_refused_and_an_unknown_one_noted(caplog):
    with pytest.raises(ImportError, match="needs megatron-core 0.19 and found 0.9.0rc1; it is tested with 0.19.0, "):
        check_version("0.9.0rc1")
    check_version("0.19.2")
    assert not caplog.records
    check_version("0.19.3")
    assert caplog.text.count("megatron-core 0.19.3 was never tried with megatron.seq1f1b") == len(caplog.records) == 1


@pytest.mark.parametrize("version", TRIED)
def test_a_version_before_its_release_is_noted(caplog, version):
    check_version(version)
    assert f"of megatron-core {version} megatron.seq1f1b was tried with {TRIED[version]} only" in caplog.text
    assert len(caplog.records) == 1


def test_the_installed_version_is_known(caplog):
    version = package_info.__version__.split("+")[0]
    check_version(version)
    assert "never tried" not in caplog.text


def test_the_scan_of_a_mixer_is_that_of_the_installed_version():
    assert callable(getattr(MambaMixer, scan_of_mamba().rpartition(".")[2]))


@pytest.mark.parametrize(("version", "displaced"), [("0.19.2", True), ("0.20.0", False), ("1.0", False)])
def test_buckets_are_displaced_before_0_20(version, displaced):
    assert displaces_padded_buckets(version) is displaced
