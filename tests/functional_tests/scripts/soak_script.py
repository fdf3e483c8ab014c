"""pretrain_gpt.py on ranks that stop for a moment at random. SOAK names the files, one of each rank, to which it writes
what its process holds at the start of every iteration.
"""

import json
import os
import time
from functools import wraps
from pathlib import Path
from random import Random

import pretrain_gpt  # before Megatron

# isort: split
from megatron.training import get_args


def main() -> None:
    rank = int(os.environ["RANK"])
    own, random, seen = pretrain_gpt.forward_step, Random(rank), set()

    @wraps(own)
    def forward_step(*args, **kwargs):
        iteration = get_args().curr_iteration
        if iteration not in seen:
            seen.add(iteration)
            with open(f"{os.environ['SOAK']}.{rank}", "a") as file:
                print(json.dumps({"iteration": iteration, **held()}), file=file)
        if random.random() < 0.03:
            time.sleep(0.1 * random.random())
        return own(*args, **kwargs)

    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})


def held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


if __name__ == "__main__":
    main()
