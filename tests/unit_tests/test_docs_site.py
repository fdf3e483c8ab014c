"""The pages in docs/: all are in the site, every link leads somewhere, every command and figure in them is right."""

import csv
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.schedule import Kind, Placement, Shape, build, sequences_held, simulate

TEACHING_FILE = "../examples/seq1f1b_from_scratch.py"  # the site has it as a page

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SLOW = ("plan", "gain-map", "profile", "train-time")
COMMANDS = [
    (page.name, shlex.split(block.replace("\\\n", " ")))
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for text in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for block in re.split(r"(?<!\\)\n", text.strip())
]
GENERATED = ("contributing.md", "from-scratch.md")  # by tools/site_hook.py
# A row of choosing.md: family, segments, chunks, bubble ratio, memory.
FIGURES = re.findall(
    r"^\| `(\S+)` \| (\d) \| (\d) \| ([\d.]+) % \| ([\d.]+) \|",
    (ROOT / "docs" / "choosing.md").read_text(),
    re.MULTILINE,
)
assert len(FIGURES) >= 6


def test_the_site_has_every_page_once_with_its_title():
    named = re.findall(r"- (.+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(name for _, name in named) == sorted([*GENERATED, *(page.name for page in PAGES)])
    for title, name in named:
        if name not in ("index.md", *GENERATED):
            assert (ROOT / "docs" / name).read_text().startswith(f"# {title}\n"), name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_stay_in_the_site_and_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        assert not target.startswith("..") or target == TEACHING_FILE, target


@pytest.mark.parametrize("family, segments, chunks, ratio, memory", FIGURES)
def test_figures_of_the_decision_table(family, segments, chunks, ratio, memory):
    schedule = build(family, Shape(Placement(8, int(chunks)), 8, int(segments)))
    peak = max(sequences_held(actions, schedule.shape) for actions in schedule.ranks)
    assert f"{100 * simulate(schedule).bubble_ratio:.1f}" == ratio and f"{peak:.2f}" == memory


IN_A_V = re.findall(
    r"^- with (\d) micro-batches ([\d.]+) % instead of ([\d.]+) %, in (\d) segments ([\d.]+) % instead of ([\d.]+) %",
    (ROOT / "docs" / "choosing.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("microbatches, whole_in_v, whole, segments, cut_in_v, cut", IN_A_V)
def test_figures_of_a_v(microbatches, whole_in_v, whole, segments, cut_in_v, cut):
    for num_segments, in_v, usual in ((1, whole_in_v, whole), (int(segments), cut_in_v, cut)):
        shapes = [Shape(place, int(microbatches), num_segments) for place in (Placement(8, 2, "v"), Placement(8))]
        found = [simulate(build(family, shape)) for family, shape in zip(("auto", "1f1b"), shapes, strict=True)]
        assert [f"{100 * timeline.bubble_ratio:.1f}" for timeline in found] == [in_v, usual]


@pytest.mark.parametrize("ranks, segments", [(2, 1), (4, 3), (8, 1), (8, 4)])
def test_a_v_idles_a_sixth_as_long_if_units_fill_the_pipeline(ranks, segments):
    fewest = -((ranks + segments - 1) // -segments)
    for microbatches in (fewest - 1, fewest, fewest + 1):
        if microbatches == 0:
            continue
        in_v = build("auto", Shape(Placement(ranks, 2, "v"), microbatches, segments))
        usual = build("1f1b", Shape(Placement(ranks), microbatches, segments))
        idle = [timeline.bubble_ratio * timeline.makespan for timeline in (simulate(in_v), simulate(usual))]
        # A chunk of the V has half of the layers, and takes as long here.
        assert (idle[0] / 2 == pytest.approx(idle[1] / 6)) == (microbatches >= fewest)
        held = [max(sequences_held(actions, plan.shape) for actions in plan.ranks) for plan in (in_v, usual)]
        assert held[0] <= held[1]


def test_gains_of_the_decision_table():
    """Those of docs/gains.csv at 30 GB/s to the host."""
    with (ROOT / "docs" / "gains.csv").open(encoding="utf-8", newline="") as file:
        found = {
            (row["model"], row["seq_length"], row["batch"], row["gpus"], row["bandwidth"]): row
            for row in csv.DictReader(file)
            if row["machine"] == "h100-80gb" and row["host_bandwidth"] == "30"
        }
    page = (ROOT / "docs" / "choosing.md").read_text()
    lines = re.findall(r"^\| ([a-z][\w-]+) \| (\d+) \| (\d+) \| (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert len(lines) == 10
    for *of_run, cells in lines:
        for bandwidth, cell in zip(("25", "50", "100", "360"), cells.split("|"), strict=True):
            row = found.get((*of_run, bandwidth))
            gain = ""
            if row is not None:
                percent = round(100 * (float(row["megatron_seconds"]) / float(row["seconds"]) - 1))
                gain = f"{percent:+}" if percent else "0"
            assert cell.strip() == gain, (of_run, bandwidth)


@pytest.mark.parametrize("package", ["megatron.seq1f1b", "megatron.seq1f1b.schedule"])
def test_the_reference_has_every_public_name(package):
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {package}\n")[1].split("\n## ")[0]
    objects = re.findall(r"^::: (seq1f1b\.\S+)\.(\w+)$", section, re.MULTILINE)
    exported = import_module(package)
    for module, name in objects:
        assert getattr(import_module(f"megatron.{module}"), name) is getattr(exported, name)
    public = {name for name, value in vars(exported).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert {name for _, name in objects} == set(getattr(exported, "__all__", public))


def test_the_way_of_a_flag_is_14_files():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\S+)` \| .*?`(\w+)`", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 15))
    for _, file, name in rows:
        source = (ROOT / "megatron" / "seq1f1b" / file).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name}\b", source), (file, name)


def test_every_kind_of_action_leads_to_what_it_calls():
    _, _, text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").partition("From an action to Megatron")
    rows = re.findall(r"^\| (.*) \| `([\w/.]+)` \| (.*) \|$", text, re.MULTILINE)
    assert {kind for kinds, _, _ in rows for kind in re.findall(r"`(\w+)`", kinds)} == {kind.value for kind in Kind}
    for _, place, calls in rows:
        path = ROOT / "megatron" / "seq1f1b" / place
        files = path.glob("*.py") if path.is_dir() else [path]
        source = " ".join(file.read_text(encoding="utf-8") for file in files)
        assert all(re.search(rf"\b{name}\b", source) for name in re.findall(r"`(\w+)`", calls)), place


def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.setenv("SITE_URL", "https://seq1f1b.example/docs/")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml", "-d", site]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert all((site / page.stem).is_dir() or page.stem == "index" for page in PAGES)
    # A table of the site keeps the backslash before a bar in code; &#124; is one everywhere.
    assert not [page for page in site.glob("*/index.html") if re.search(r"<code[^>]*>[^<]*\\\|", page.read_text())]
    for page in (site / "index.html", site / "planning" / "index.html"):
        image = re.search('<meta property="og:image" content="https://seq1f1b.example/docs/(.*)">', page.read_text())
        assert (site / image[1]).is_file(), "the picture of a shared link"
    assert 'href="../from-scratch/"' in (site / "how-it-works" / "index.html").read_text()
    assert "def order" in re.sub("<[^>]*>", "", (site / "from-scratch" / "index.html").read_text())
    contributing = (site / "contributing" / "index.html").read_text()
    assert 'href="../schedules/"' in contributing
    # Code that is indented by less than 4 ends a list on the site, and numbers start again.
    assert contributing.count("<ol>") == len(re.findall(r"\n\n1\. ", (ROOT / "CONTRIBUTING.md").read_text()))
    assert "NCCL_MULTI_RANK_GPU_ENABLE" in (site / "measured-h200" / "index.html").read_text()  # it is in braces
    assert 'The inverse of <code class="word">str(action)</code>' in (site / "reference" / "index.html").read_text()


@pytest.mark.parametrize(
    "page, words",
    [
        # Some take many seconds of a core; test_plan.py has them on fewer GPUs.
        pytest.param(page, words, marks=[pytest.mark.exhaustive] * (words[1] in SLOW))
        for page, words in COMMANDS
        if words[0] == "seq1f1b"
    ],
    ids=str,
)
def test_commands_run(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "gpipe-zb" in words:
        pytest.skip("of the newcomer's walk: test_contributing.py runs it")
    if "compare" in words:
        pytest.skip("of two training runs: test_quickstart.py compares them")
    if "enable" in words:
        pytest.skip("changes this Python: test_environment.py runs it in a folder")
    if "--timeline" in words:  # what a training run would have written
        for timeline in (Path(word) for word in words if word.endswith(".json")):
            timeline.parent.mkdir(exist_ok=True)
            assert commands.main(["plot", "--output", str(timeline)]) == 0
    if "FILE.csv" in words:
        assert commands.main(["plot", "--output", "FILE.csv"]) == 0
    if "lengths.csv" in words:
        written = re.search(r"printf '(.*)' > lengths.csv", (ROOT / "docs" / "planning.md").read_text(encoding="utf-8"))
        Path("lengths.csv").write_text(written[1].replace(r"\n", "\n"), encoding="utf-8")
    words = words[1:]
    if "--output" in words and words[words.index("--output") + 1].endswith(".png"):
        pytest.importorskip("matplotlib")
    assert commands.main(words) == 0
