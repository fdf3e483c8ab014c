"""A hook of MkDocs that adds CONTRIBUTING.md and the teaching file as pages, and the playground's Python: the schedules
of this package and, where it was fetched, Pyodide."""

import re
import shutil
import zipfile
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron" / "seq1f1b"
# What the page runs. Without the `__init__.py` above them, whose imports need torch.
SOURCES = ("schedule/**/*.py", "files/writing.py", "report/style.py")
PYODIDE = ROOT / "build" / "pyodide"  # scripts/site.sh puts it there
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")


# A path from docs/, as readers of the repository follow it, and its page in the site.
TEACHING_FILE = "../examples/seq1f1b_from_scratch.py"
TEACHING_PAGE = "from-scratch.md"


def on_files(files, config, **_):
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    code = (ROOT / "docs" / TEACHING_FILE).read_text("utf-8")
    page = f"# Seq1F1B from scratch\n\n```python\n{code}```\n"
    files.append(File.generated(config, TEACHING_PAGE, content=page))
    return files


def on_page_markdown(markdown, **_):
    return markdown.replace(f"]({TEACHING_FILE})", f"]({TEACHING_PAGE})")


def on_page_content(html, **_):
    """Code without a space, and cells of a figure and its unit, are marked, so that css/site.css can keep them on one
    line."""
    html = re.sub(r"<td>([-+(]?\d[^\s<]*( [^\s\d<][^\s<]*)?)</td>", r'<td class="figure">\1</td>', html)
    return re.sub(r"<code>([^\s<]+)</code>", r'<code class="word">\1</code>', html)


def on_post_build(config, **_) -> None:
    folder = Path(config.site_dir) / "playground"
    with zipfile.ZipFile(folder / "schedule.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
            archive.write(path, path.relative_to(ROOT))
        archive.write(ROOT / "docs" / "playground" / "playground.py", "playground.py")
    if PYODIDE.is_dir():
        (folder / "pyodide").mkdir(exist_ok=True)
        for name in RUNTIME:
            shutil.copy2(PYODIDE / name, folder / "pyodide")
