"""The process groups in which messages between pipeline ranks travel.

Tested in runtime/test_communication.py.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..schedule import Channel, Kind

# Thread blocks of an NCCL kernel for messages, unless Megatron's configuration for `pp` sets a number. NCCL would take
# up to 32 over NVLink, an eighth of an H100.
MAX_CTAS = 4
_NCCL_UNDEFINED = -(2**31)


def groups_per_communicator(
    group: dist.ProcessGroup, channels: Iterable[Channel], timeout: timedelta
) -> dict[tuple, dist.ProcessGroup]:
    """A process group over the ranks of `group` for each communicator that the channels need.

    Creating a group is a collective of the whole world, so every rank creates those of every pipeline.
    """
    own = dist.get_process_group_ranks(group)
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    groups = {}
    for payload, goes_up, parity in sorted({channel.communicator for channel in channels}):
        what = "activations" if payload is Kind.F else "gradients"
        source = "odd" if parity else "even"
        words = f"{what} from {source} to {'higher' if goes_up else 'lower'} pipeline ranks"
        options = _options(group)
        for ranks in sorted(set(map(tuple, pipelines))):
            new_group = dist.new_group(
                ranks,
                timeout=timeout,
                backend=dist.get_backend(group),
                pg_options=options,
                group_desc=words,
            )
            if list(ranks) == own:
                groups[payload, goes_up, parity] = new_group
    return groups


def _options(group: dist.ProcessGroup) -> Any:
    """Options of an NCCL group for messages, by Megatron's for `pp` (--nccl-communicator-config-path); else None.

    A receive is posted a whole action ahead, and its kernel waits beside compute: at high priority, to end as soon as
    the message is there, and on few multiprocessors.
    """
    if dist.get_backend(group) != "nccl":
        return None
    backend: Any = group._get_backend(torch.device("cuda"))
    own = backend.options.config
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    for name in ("cga_cluster_size", "min_ctas", "max_ctas", "net_name"):
        value = getattr(own, name)
        if value not in (None, _NCCL_UNDEFINED):  # the setters crash if a name is None
            setattr(options.config, name, value)
    return options
