"""Groups of gloo, as training on a CPU makes them."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.seq1f1b.cpu.gloo import on_one_device


def polling_threads() -> int:
    return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))


def test_groups_poll_in_one_thread() -> None:
    kind = on_one_device(dist.ProcessGroupGloo)
    store, minute = dist.HashStore(), timedelta(minutes=1)
    groups = [kind(dist.PrefixStore("first", store), 0, 1, minute)]
    before = polling_threads()
    groups += [kind(dist.PrefixStore(str(i), store), 0, 1, minute) for i in range(9)]
    assert polling_threads() == before
    for group in groups:
        ones = torch.ones(2)
        group.allreduce([ones]).wait()
        assert ones.tolist() == [1, 1]
    torchs_own = [dist.ProcessGroupGloo(dist.PrefixStore(f"own {i}", store), 0, 1, minute) for i in range(2)]
    assert polling_threads() == before + len(torchs_own)
