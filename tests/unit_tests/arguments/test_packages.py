"""Packages with kernels for GPUs, on fake installations."""

import argparse
from importlib.metadata import PackageNotFoundError

import pytest

from megatron.seq1f1b.arguments import packages

ON_GPU = {"distributed_backend": "nccl"}


@pytest.mark.parametrize(
    "fla, triton, is_hopper, are_wrong",
    [
        ("0.4.2", "3.3.1", True, False),
        ("0.4.2", "3.4.0", True, True),
        ("0.4.2", "3.7.0", True, True),
        ("0.4.2", "3.7.1+git1", True, False),
        ("0.4.2", "3.6.0", False, False),
        ("0.5.0.dev1", "3.6.0", True, False),
        (None, "3.6.0", True, False),
    ],
)
def test_gated_delta_nets_are_wrong_by_version(monkeypatch, fla, triton, is_hopper, are_wrong):
    """Later ones refuse to run there, and Megatron names one that is missing."""

    def version(name):
        found = {"fla-core": fla, "triton": triton}.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(packages, "version", version)
    monkeypatch.setattr(packages, "_is_hopper", lambda: is_hopper)
    assert packages.delta_nets_are_wrong(ON_GPU) == are_wrong
    assert not packages.delta_nets_are_wrong(ON_GPU | {"dry_run": True})


@pytest.mark.parametrize(
    "given, is_refused",
    [
        ({"attention_dropout": 0.1}, False),
        ({"reset_attention_mask": True}, False),
        ({"attention_dropout": 0.1, "reset_attention_mask": True}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0)}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0), "distributed_backend": "gloo"}, False),
    ],
)
def test_fused_attention_has_no_dropout_in_documents_or_windows(given, is_refused):
    settings = ON_GPU | {"attention_backend": argparse.Namespace(name="fused")} | given
    assert packages.fused_attention_has_no_backend(settings) == is_refused
