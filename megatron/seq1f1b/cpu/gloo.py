"""Process groups of gloo that share one device.

A device of gloo is a thread that polls its sockets a hundred times a second, and torch gives each group a device of its
own. Megatron makes some thirty groups a rank, so that the ranks of one machine would spend much of it on polling: 60
groups take a fifth of a core while nothing happens, on a shared device less than a hundredth.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


def on_one_device(gloo: type[dist.ProcessGroupGloo]) -> type[dist.ProcessGroupGloo]:
    """The class of groups that torch makes, with the devices of a process in common."""

    class OnOneDevice(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = _devices_of(os.getpid())
            options._threads = 2 * len(options._devices)  # as torch has it
            super().__init__(store, rank, size, options)

    return OnOneDevice


@cache
def _devices_of(process: int) -> list[Any]:
    """Those that torch would make for a group: one for each interface that GLOO_SOCKET_IFNAME names.

    Their threads do not live on in a fork, so that each `process` has its own.
    """
    make = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]
