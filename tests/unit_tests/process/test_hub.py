"""The hub is asked for nothing where it cannot be reached."""

import socket

import pytest
from huggingface_hub import constants

from megatron.seq1f1b.process import hub


@pytest.fixture
def asked(monkeypatch):
    """The hosts that were asked for a connection, which none of them gives."""
    asked = []

    def refused(address, timeout):
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    return asked


@pytest.mark.parametrize("kind, model", [("GPT2BPETokenizer", None), ("HuggingFaceTokenizer", "gpt2")])
def test_a_hub_out_of_reach_is_left_alone(asked, kind, model, caplog):
    hub.spare_hub(kind, model)
    assert asked == [("hub.example", 443)] and constants.HF_HUB_OFFLINE
    assert "https://hub.example cannot be reached" in caplog.text


def test_a_tokenizer_of_files_asks_nobody(asked, tmp_path):
    hub.spare_hub("HuggingFaceTokenizer", str(tmp_path))
    hub.spare_hub("NullTokenizer", None)
    assert not asked and not constants.HF_HUB_OFFLINE


def test_what_lies_behind_a_proxy_is_left_to_the_library(asked, monkeypatch):
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    hub.spare_hub("GPT2BPETokenizer", None)
    assert not asked and not constants.HF_HUB_OFFLINE
