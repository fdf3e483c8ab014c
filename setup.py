"""README.md as the page of a package index shows it; all else is in pyproject.toml.

Its paths lead nowhere on such a page. With SITE_REPOSITORY=https://github.com/OWNER/NAME at the build they become
addresses in that repository; without it a link becomes its words, and a picture its caption.
"""

import os
import re
from pathlib import Path

from setuptools import setup

# A link or a picture, its words, and a path of the repository.
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


def page(readme: str, repository: str | None) -> str:
    """The text of README.md without paths."""

    def addressed(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        if not repository:
            return words
        folder = "raw" if mark else "blob"
        return f"{mark}[{words}]({repository}/{folder}/main/{path})"

    return LINK.sub(addressed, readme)


if __name__ == "__main__":
    setup(
        long_description=page(
            Path(__file__).with_name("README.md").read_text(encoding="utf-8"), os.environ.get("SITE_REPOSITORY")
        ),
        long_description_content_type="text/markdown",
    )
