"""The hub of Hugging Face, which its library keeps asking for most of a minute where there is no network.

Some tokenizers ask the hub for files beside those that flags name. Where no connection can be made, the library goes on
without these files, but only after it has repeated every request. Here it does so at once.
"""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from .ranks import warn_on_rank_0

# The tokenizers of Megatron that the library looks for at the hub, whatever files they are given.
_NAMED_AT_HUB = ("BertWordPieceCase", "BertWordPieceLowerCase", "GPT2BPETokenizer")
_PATIENCE = 10.0  # seconds


def spare_hub(tokenizer_type: str, tokenizer_model: str | None) -> None:
    """Keep the library from asking the hub for files of this tokenizer if the hub cannot be reached."""
    is_named_there = tokenizer_type == "HuggingFaceTokenizer" and not Path(tokenizer_model or ".").exists()
    if not (is_named_there or tokenizer_type in _NAMED_AT_HUB):
        return
    from huggingface_hub import constants  # comes with Megatron's tokenizers

    if constants.HF_HUB_OFFLINE or _is_reachable(constants.ENDPOINT):
        return
    constants.HF_HUB_OFFLINE = True  # what the variable of this name sets
    warn_on_rank_0(f"{constants.ENDPOINT} cannot be reached; the tokenizer is made of files on this machine alone.")


def _is_reachable(address: str) -> bool:
    """Whether a connection to this address can be made; True behind a proxy, which only the library can use."""
    if getproxies() or os.environ.get("ALL_PROXY"):
        return True
    parts = urlsplit(address)
    usual_port = 80 if parts.scheme == "http" else 443
    try:
        socket.create_connection((parts.hostname or "", parts.port or usual_port), _PATIENCE).close()
    except OSError:
        return False
    return True
