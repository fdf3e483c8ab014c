"""pretrain_gpt.py with a defect: rank 0 cuts a token off every message, and rank 1 does not send its last one."""

import runpy
from pathlib import Path

import megatron.seq1f1b

megatron.seq1f1b.install()

import torch.distributed as dist  # noqa: E402

from megatron.seq1f1b.runtime.communication import Communicator  # noqa: E402
from megatron.seq1f1b.schedule import Action, Kind  # noqa: E402

LAST = Action(Kind.SEND_B, 1, 3, 0)
send = Communicator.send


def send_something_else(self, channel, tensor, shape, action=None):
    if action is not None and dist.get_rank() == 0:
        tensor, shape = tensor[1:], (shape[0] - 1, *shape[1:])
    if action != LAST:
        send(self, channel, tensor, shape, action)


if __name__ == "__main__":
    Communicator.send = send_something_else
    runpy.run_path(str(Path(__file__).parents[3] / "pretrain_gpt.py"), run_name="__main__")
