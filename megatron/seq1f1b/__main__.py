"""Runs an unmodified Megatron training script under our schedules, with our flags added to its own.

torchrun --nproc-per-node 8 -m megatron.seq1f1b pretrain_gpt.py --sequence-splits 4 ...
"""

import runpy
import sys
from pathlib import Path

from megatron.seq1f1b.files.reading import check_program
from megatron.seq1f1b.launch import install


def main() -> None:
    """`python -m megatron.seq1f1b SCRIPT [ARGUMENTS]`."""
    names_script = len(sys.argv) > 1 and sys.argv[1].strip() and not sys.argv[1].startswith("-")
    if not names_script:
        raise SystemExit("usage: python -m megatron.seq1f1b SCRIPT [ARGUMENTS], with a Megatron training script")
    # As if the script had been run directly: its name comes first, and imports start in its folder.
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install(add_flags=True)
    check_program(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
