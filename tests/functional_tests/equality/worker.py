"""Runs equality cases in one process group, and prints one line for each; started on several ranks.

worker.py FILE    # with the ids of the cases, one a line; see suites.py
"""

import sys
from pathlib import Path

import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from functional_tests.equality.comparison import References, Verdict, compare, patches_of  # noqa: E402
from functional_tests.equality.suites import groups  # noqa: E402
from megatron.seq1f1b.model.without_te import OUTPUT_LAYER  # noqa: E402
from megatron.seq1f1b.process.patches import patched  # noqa: E402


def agreed(name: str, verdict: Verdict) -> str:
    """The verdict of all ranks, in one line."""
    found: list[Verdict] = [None] * dist.get_world_size()
    dist.all_gather_object(found, verdict)
    wrong = [(rank, *each) for rank, verdict in enumerate(found) for each in verdict.wrong]
    if not wrong:
        gradients, worst = sum(verdict.gradients for verdict in found), max(verdict.worst for verdict in found)
        return f"case {name}: equal, {gradients} gradients, worst {worst:.1e}"
    rank, size, what = max(wrong, key=lambda each: each[1])
    return f"case {name}: {len(wrong)} values differ, the worst by {size:.1e}: {what}, on rank {rank}"


def main() -> None:
    # As `install` does where Transformer Engine is there without apex.
    patched(OUTPUT_LAYER)
    dist.init_process_group("gloo")
    selected = set(Path(sys.argv[1]).read_text().split())
    references = References()
    for group in groups():
        cases = {name: case for name, case in group.cases.items() if name in selected}
        if not cases or group.ranks != dist.get_world_size():
            continue
        with patched(patches_of(group.model)):
            for name, verdict in compare(references, group.model, group.layout, cases):
                line = agreed(name, verdict)
                if dist.get_rank() == 0:
                    print(line, flush=True)


if __name__ == "__main__":
    main()
