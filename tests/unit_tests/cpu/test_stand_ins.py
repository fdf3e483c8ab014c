"""Groups of gloo, as training on a CPU makes them."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.seq1f1b.cpu import stand_ins

MINUTE = timedelta(minutes=1)


def test_groups_share_one_device(monkeypatch) -> None:
    """A device is a thread that polls; torch makes one for each group that is not given any."""
    made = []
    make = dist.ProcessGroupGloo.create_default_device
    monkeypatch.setattr(
        dist.ProcessGroupGloo, "create_default_device", lambda: made.append(make()) or made[-1], raising=False
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    stand_ins._devices_of.cache_clear()
    kind, store = stand_ins.on_one_device(dist.ProcessGroupGloo), dist.HashStore()
    groups = [kind(dist.PrefixStore(str(number), store), 0, 1, MINUTE) for number in range(10)]
    assert len(made) == 1
    for group in groups:
        ones = torch.ones(2)
        group.allreduce([ones]).wait()
        assert ones.tolist() == [1, 1]
        assert group.options._devices == made
        assert group.options._threads == 1  # two of torch's corrupt the heap
    stand_ins._devices_of.cache_clear()
