#!/usr/bin/env python3
"""Write the table of what is supported into docs/compatibility.md and, in short, into the README."""

import re
from pathlib import Path

from megatron.seq1f1b.arguments.supported import as_markdown

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- features: .*? -->\n).*?(\n<!-- end of features -->)", re.DOTALL)


def main() -> None:
    for path, is_for_readme in ((ROOT / "docs" / "compatibility.md", False), (ROOT / "README.md", True)):
        table = as_markdown(is_for_readme)
        text = path.read_text(encoding="utf-8")
        path.write_text(TABLE.sub(lambda found, table=table: found[1] + table + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
