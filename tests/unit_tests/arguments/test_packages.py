"""Packages with kernels for GPUs, on fake installations."""

import argparse
from importlib.metadata import PackageNotFoundError

import pytest

from megatron.seq1f1b.arguments import packages

ON_GPU = {"distributed_backend": "nccl"}


@pytest.fixture
def install(monkeypatch):
    """Let distributions of these versions, and modules of these names, be the only ones."""

    def installed(distributions, modules=(), is_hopper=True):
        def version(name):
            if name not in distributions:
                raise PackageNotFoundError(name)
            return distributions[name]

        monkeypatch.setattr(packages, "version", version)
        monkeypatch.setattr(packages, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(packages, "_is_hopper", lambda: is_hopper)

    return installed


@pytest.mark.parametrize(
    "fla, triton, other_modules, is_hopper, is_right",
    [
        ("0.4.2", "3.3.1", (), True, True),
        ("0.4.2", "3.4.0", (), True, False),
        ("0.4.2", "3.6.0", ("tilelang",), True, False),
        ("0.4.2", "3.7.1", (), True, True),
        ("0.5.0", "3.3.1", (), True, True),
        ("0.5.0", "3.7.1", (), True, False),
        ("0.5.1", "3.7.1+git1", ("tilelang",), True, True),
        ("0.5.2", "3.7.0", (), True, False),
        ("0.5.2", "3.7.0", ("tilelang",), True, True),
        ("0.5.2", "3.7.1", (), True, True),
        ("0.6.0.dev1", "3.8", (), True, True),
        ("0.4.2", "3.6.0", (), False, True),
    ],
)
def test_gated_delta_nets_need_versions_that_are_right(install, fla, triton, other_modules, is_hopper, is_right):
    distributions = {"flash-linear-attention": fla, "triton": triton}
    install(distributions, ("fla", *other_modules), is_hopper)
    assert packages.lacks_delta_nets(ON_GPU) != is_right
    assert not packages.lacks_delta_nets(ON_GPU | {"dry_run": True})
    install(distributions)
    assert packages.lacks_delta_nets(ON_GPU)


def test_the_folder_that_flash_attn_ships_is_not_flash_attn_4(install):
    install({"flash-attn": "2.8.3"}, ("flash_attn", "flash_attn.cute"))
    assert packages.lacks_flash_attention(ON_GPU | {"flash_attention_version": 4})
    assert not packages.lacks_flash_attention(ON_GPU | {"flash_attention_version": 2})
    install({"flash-attn-4": "4.0.0b19"}, ("flash_attn_interface",))
    assert not packages.lacks_flash_attention(ON_GPU | {"flash_attention_version": 4})
    assert not packages.lacks_flash_attention(ON_GPU | {"flash_attention_version": 3})


@pytest.mark.parametrize(
    "given, is_refused",
    [
        ({}, False),
        ({"attention_dropout": 0.1}, False),
        ({"reset_attention_mask": True}, False),
        ({"window_size": (128, 0)}, False),
        ({"attention_dropout": 0.1, "reset_attention_mask": True}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0)}, True),
        ({"attention_dropout": 0.1, "window_size": (128, 0), "distributed_backend": "gloo"}, False),
    ],
)
def test_fused_attention_has_no_dropout_in_documents_or_windows(given, is_refused):
    settings = ON_GPU | {"attention_backend": argparse.Namespace(name="fused")} | given
    assert packages.fused_attention_has_no_backend(settings) == is_refused
