"""Whether the ranks that torchrun started can send each other messages over NCCL, in two groups both ways at once.

It imports PyTorch alone, so that an attempt takes seconds.
"""

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ELEMENTS = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--backend", default="nccl")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(args.backend, timeout=timedelta(seconds=20 if args.device == "cuda" else 60))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.full((ELEMENTS,), rank + 1.0, device=args.device)
    dist.all_reduce(total)
    following, preceding = (rank + 1) % size, (rank - 1) % size
    # As between pipeline ranks: activations go up and gradients down, each in a group of its own.
    up, down = (dist.new_group(list(range(size))) for _ in range(2))
    sent = torch.full((ELEMENTS,), float(rank), device=args.device)
    from_below, from_above = (torch.empty_like(sent) for _ in range(2))
    work = []
    for group, to, source, arrived in (
        (up, following, preceding, from_below),
        (down, preceding, following, from_above),
    ):
        operations = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, arrived, source, group)]
        work += dist.batch_isend_irecv(operations)
    for each in work:
        each.wait()
    expected = ((total, size * (size + 1) / 2), (from_below, preceding), (from_above, following))
    is_right = all(bool((tensor == value).all()) for tensor, value in expected)
    if rank == 0:
        check = {"name": "NCCL between ranks on one GPU", "passed": is_right, "found": f"{size} ranks"}
        args.output.write_text(json.dumps({"checks": [check], "figures": []}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
