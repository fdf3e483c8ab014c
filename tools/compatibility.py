#!/usr/bin/env python3
"""Write the table of what is unsupported into docs/compatibility.md."""

import re
from pathlib import Path

from megatron.seq1f1b.arguments.unsupported import UNSUPPORTED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
TABLE = re.compile(r"(<!-- unsupported: .*? -->\n).*?(\n<!-- end of unsupported -->)", re.DOTALL)


def with_table(page: str) -> str:
    lines = ["| feature | unsupported | because it | way out |", "|---|---|---|---|"]
    for use, rows in UNSUPPORTED.items():
        lines += [f"| `{row.feature}` | {use.value} | {row.because} | {row.way_out} |" for row in rows]
    return TABLE.sub(lambda found: found[1] + "\n".join(lines) + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
