"""Runs pretrain_gpt.py for real, one step of it, and counts its storages as a rehearsal counts its fake ones."""

import json
import os
import runpy
from dataclasses import asdict
from functools import partial
from pathlib import Path

import megatron.seq1f1b

megatron.seq1f1b.install()

import megatron.training  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.training import training  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from megatron.seq1f1b.costs.machine import bytes_outside  # noqa: E402
from megatron.seq1f1b.launch.overlay import installed  # noqa: E402
from megatron.seq1f1b.model import HostMemory  # noqa: E402
from megatron.seq1f1b.model.memory.host_blocks import mapped_buffer  # noqa: E402
from megatron.seq1f1b.rehearsal.ledger import Ledger  # noqa: E402
from megatron.seq1f1b.rehearsal.stage import RehearsedStage  # noqa: E402
from megatron.seq1f1b.runtime import Surroundings  # noqa: E402
from megatron.seq1f1b.runtime.communication import Communicator  # noqa: E402


class RealStage(RehearsedStage):
    """Its tensors are real, and the other ranks run, too."""

    def __init__(self, args) -> None:
        super().__init__(args, installed().rehearse_in, bytes_outside)
        self.ledger = Ledger()
        self._stand_ins = ()
        self._surroundings = Surroundings(host_memory=partial(HostMemory, new_buffer=self.new_buffer))

    def new_buffer(self, num_bytes):
        self._host_bytes += num_bytes
        buffer = mapped_buffer(num_bytes)
        self.ledger.label(buffer, None)
        return buffer

    def uncounted(self, batches):
        """A data set keeps tensors for later batches, in the memory of the host."""
        while True:
            with _disable_current_modes():
                batch = next(batches)
            self.ledger.label(tree_map_only(torch.Tensor, torch.Tensor.detach, batch), None)
            yield batch

    def _data(self, build, *args, **kwargs):
        train, valid, test = build(*args, **kwargs)
        if train is not None:
            train.iterable = self.uncounted(train.iterable)
        return train, valid, test


def counted(pretrain, *args, **kwargs) -> None:
    """Megatron's `pretrain` up to the end of its first step; writes the rank's moments to the folder COUNTS."""
    stage = RealStage(megatron.training.get_args())
    Communicator.send = sending_copies(Communicator.send, stage.ledger)
    report = stage.run(partial(pretrain, *args, **kwargs))
    moments = [asdict(moment) for moment in report.moments]
    Path(os.environ["COUNTS"], f"{report.rank}.json").write_text(json.dumps(moments))
    dist.barrier()


def sending_copies(send, ledger):
    """What is sent is a copy that is not counted: a message lives until the peer takes it, which is a matter of luck.

    Here none leaves before the end of the step, so that a message that is counted always shows.
    """

    def send_copy(communicator, channel, tensor, *args) -> None:
        copy = tensor.detach().clone()
        ledger.label(copy, None)
        send(communicator, channel, copy, *args)
        held.append(copy)

    held = []
    return send_copy


if __name__ == "__main__":
    megatron.training.pretrain = training.pretrain = partial(counted, training.pretrain)
    runpy.run_path(str(Path(__file__).parents[3] / "pretrain_gpt.py"), run_name="__main__")
