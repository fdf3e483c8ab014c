"""Let programs that nobody edits run on segments: frameworks for post-training, and the workers that they start.

    seq1f1b enable
    SEQ1F1B="--segment-tokens 8192" python -m verl.trainer.main_ppo ...

Writes seq1f1b.pth, one line, into the site-packages of this Python. From then on a process that has the variable
SEQ1F1B in its environment installs our schedules, with these flags, when it imports Megatron, and logs one line.
Without the variable nothing changes.
"""

# Tested in functional_tests/test_environment.py by test_the_file_is_removed_again.

import sysconfig
from pathlib import Path

from ..arguments.flags import given_path
from .parsing import Parser

# What Python runs when it starts, as a line of a .pth file.
LINE = """
import os; os.environ.get("SEQ1F1B") and __import__("megatron.seq1f1b.launch.environment", fromlist=["watch"]).watch()
""".lstrip()


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--remove", action="store_true", help="remove the file again")
    parser.add_argument(
        "--folder",
        type=given_path,
        metavar="DIR",
        default=sysconfig.get_path("purelib"),
        help="another folder whose .pth files Python reads (default: site-packages of this Python)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    file = Path(args.folder, "seq1f1b.pth")
    if args.remove:
        file.unlink(missing_ok=True)
        print(f"{file} is removed")
        return
    file.write_text(LINE, encoding="utf-8")
    print(f"{file} is written; give flags in SEQ1F1B, such as SEQ1F1B='--segment-tokens 8192'")
