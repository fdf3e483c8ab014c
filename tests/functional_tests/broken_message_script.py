"""pretrain_gpt.py, whose first pipeline rank sends every message one token too short."""

import os
import runpy
from pathlib import Path

import megatron.seq1f1b

megatron.seq1f1b.install()

from megatron.seq1f1b.runtime.communication import Communicator  # noqa: E402

send = Communicator.send


def send_too_little(self, channel, tensor, action=None):
    is_broken = action is not None and os.environ["RANK"] == "0"
    send(self, channel, tensor[1:] if is_broken else tensor, action)


if __name__ == "__main__":
    Communicator.send = send_too_little
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
