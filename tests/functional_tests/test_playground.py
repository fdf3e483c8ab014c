"""The playground of the docs in a browser: the figures that Python computes there are those that it computes here."""

import json
import os
import shutil
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal

import pytest
from playground import answer

from support.browser import PATIENCE, served
from support.launch import ROOT

READY = "document.getElementById('status').textContent !== 'Loading Python ...'"
CAPTION = "(document.querySelector('figcaption')?.textContent ?? '')"
SHOWN = """({
    captions: [...document.querySelectorAll('figcaption')].map((each) => each.textContent),
    status: document.getElementById('status').textContent,
    colours: [...document.querySelectorAll('canvas')].map((canvas) => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Set();
        for (let i = 0; i < pixels.length; i += 4)
            found.add('#' + [0, 1, 2].map((j) => pixels[i + j].toString(16).padStart(2, '0')).join(''));
        return [...found];
    }),
})"""
FITS = "document.documentElement.scrollWidth <= innerWidth"
IDLE = "[...document.querySelectorAll('label > :disabled')].map((input) => input.name)"
SET = """(([name, value]) => {
    const input = document.querySelector(`[name=${name}]`);
    input.value = value;
    input.dispatchEvent(new Event('input', { bubbles: true }));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    if shutil.which("npm") is None and not (ROOT / "build" / "pyodide").is_dir():
        pytest.skip("npm, which fetches Pyodide, is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = ["bash", ROOT / "scripts" / "site.sh", folder]
    run = subprocess.run(build, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    if run.returncode and "npm error" in run.stderr:
        pytest.skip(f"Pyodide cannot be fetched: {run.stderr[:300]}")
    assert run.returncode == 0, run.stderr
    return folder


def fixed(value: float, digits: int) -> str:
    """As JavaScript's toFixed, which rounds 13.125 up where Python rounds it to an even digit."""
    return str(Decimal(value).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))


def check(page, **settings) -> None:
    """What the page shows is what the same Python answers here."""
    panels = json.loads(answer(json.dumps(settings)))["panels"]
    first = panels[0]
    shows = f"step {fixed(first['time'], 2)}, bubble ratio {fixed(first['bubble_ratio'], 3)}"
    # By name, too: the step of a picture on the way may be as long.
    page.wait_for(f"{CAPTION}.startsWith('{first['name']}') && {CAPTION}.includes('{shows}')")
    shown = page.evaluate(SHOWN)
    assert len(shown["captions"]) == len(panels)
    for caption, colours, panel in zip(shown["captions"], shown["colours"], panels, strict=True):
        assert caption.startswith(panel["name"])
        assert f"at most {fixed(max(panel['memory']), 2)} sequences in memory" in caption
        kinds = {box[0] for boxes in panel["ranks"] for box in boxes}
        for kind in kinds:
            assert set(panel["colours"][kind]) & set(colours), f"{kind} is not drawn"
    assert f"{fixed(panels[0]['time'] / panels[1]['time'], 3)} of the time" in shown["status"]


@pytest.mark.timeout(3 * PATIENCE)
def test_sliders_draw_what_the_package_makes(site, page):
    with served(site) as address:
        page.open(f"{address}/playground/#segments=2&attention=0")
        page.wait_for(READY)
        check(page, segments=2, attention=0)
        assert page.evaluate(IDLE) == ["placement", "memory"]
        assert page.evaluate("document.querySelector('canvas').ariaLabel").startswith(
            "Timeline: a row for each of 4 ranks."
        )
        page.evaluate(f"{SET}(['family', 'zb-h1'])")
        check(page, segments=2, attention=0, family="zb-h1")
        for name, value in (("chunks", "2"), ("placement", "v"), ("cut", "even"), ("family", "auto")):
            page.evaluate(f"{SET}(['{name}', '{value}'])")
        settings = {"chunks": 2, "placement": "v", "cut": "even", "family": "auto"}
        check(page, segments=2, attention=0, **settings)
        assert page.evaluate("location.hash").startswith("#family=auto&segments=2&")
        for name in ("ranks", "microbatches"):
            page.evaluate(f"{SET}(['{name}', '16'])")
        page.evaluate(f"{SET}(['segments', '16'])")
        page.wait_for("document.getElementById('status').className === 'error'")
        assert "too many" in page.evaluate("document.getElementById('status').textContent")
        assert page.evaluate("document.querySelector('figure')") is None and page.evaluate(IDLE) == []
        page.evaluate("location.hash = '#family=bogus&segments=1&ranks=4&microbatches=4'")
        page.wait_for(f"{CAPTION}.startsWith('auto, whole sequences')")
        assert page.problems == [] and page.evaluate(FITS)


@pytest.mark.timeout(3 * PATIENCE)
def test_a_preset_is_drawn_copied_and_saved(site, page, tmp_path):
    """The flags that are copied are those of the picture, and the picture that is saved has all of its boxes."""
    with served(site) as address:
        page.open(f"{address}/playground/")
        page.wait_for(READY)
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        page.evaluate(
            "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return '#'; }"
        )
        # What one preset has set is not left to the next.
        for preset, of_preset in (
            ("family=auto&chunks=2&placement=v", {"family": "auto", "segments": 1, "chunks": 2, "placement": "v"}),
            ("family=breadth-first&chunks=2", {"family": "breadth-first", "segments": 1, "chunks": 2}),
            ("segments=4&chunks=2", {"chunks": 2}),
        ):
            page.evaluate(f"{SET}(['preset', '{preset}'])")
            check(page, **of_preset)
        page.evaluate("document.querySelector('[data-copy=flags]').click()")
        page.wait_for("window.copied")
        copied = page.evaluate("window.copied")
        assert copied.startswith("--pipeline-schedule 1f1b --pipeline-model-parallel-size 4 --sequence-splits 4 ")
        assert copied.endswith(" balanced --num-virtual-stages-per-pipeline-rank 2")
        page.evaluate("document.getElementById('svg').click()")
        page.wait_for("window.saved")
        panels = json.loads(answer(json.dumps({"chunks": 2})))["panels"]
        boxes = sum(len(boxes) for panel in panels for boxes in panel["ranks"])
        saved = page.evaluate("window.saved")
        assert saved.count("<title>") == boxes
        for caption in page.evaluate(SHOWN)["captions"]:
            assert f">{caption}</text>" in saved
        for column in ("memory", "bubble"):
            assert saved.count(f">{column}</text>") == len(panels)
        # The plot command makes the same step, also where costs and memory decide the order.
        page.evaluate(f"{SET}(['memory', '2'])")
        page.evaluate(f"{SET}(['message', '0.1'])")
        page.evaluate(f"{SET}(['family', 'auto'])")
        settings = {"chunks": 2, "family": "auto", "memory": 2, "message": 0.1}
        check(page, **settings)
        page.evaluate("window.copied = ''; document.querySelector('[data-copy=plot]').click()")
        page.wait_for("window.copied")
        command = page.evaluate("window.copied").replace("schedule.svg", "timeline.json")
        main = "import sys; from megatron.seq1f1b.commands import main; sys.exit(main())"
        program = f"seq1f1b() {{ {sys.executable} -c '{main}' \"$@\"; }}\n"
        subprocess.run(["bash", "-ec", program + command], cwd=tmp_path, check=True)
        timeline = json.loads((tmp_path / "timeline.json").read_text())
        ours = json.loads(answer(json.dumps(settings)))["panels"][0]
        assert max(span["end"] for rank in timeline["ranks"] for span in rank) == pytest.approx(ours["time"])
        width = page.evaluate("document.querySelector('canvas').clientWidth")
        page.evaluate(f"{SET}(['zoom', '2'])")
        page.wait_for(f"document.querySelector('canvas').clientWidth === {2 * width}")
        page.evaluate("location.hash = '#family=zb-h1'")  # no preset of the list
        page.wait_for("document.querySelector('[name=preset]').value === ''")
        assert page.problems == []


@pytest.mark.timeout(3 * PATIENCE)
def test_a_load_that_fails_is_reported(site, page, tmp_path):
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "playground" / "schedule.zip").unlink()
    with served(broken) as address:
        page.open(f"{address}/playground/")
        page.wait_for("document.getElementById('status').className === 'error'")
        status = page.evaluate("document.getElementById('status').textContent")
        assert status == "Python did not load or stopped: schedule.zip: 404. Reload the page to try again."


@pytest.mark.timeout(3 * PATIENCE)
def test_on_a_phone_the_picture_stays_with_its_controls(site, page):
    with served(site) as address:
        page.resize(390, 844)
        page.open(f"{address}/playground/")
        page.wait_for("document.querySelector('canvas') !== null")
        page.evaluate("document.getElementsByName('memory')[0].scrollIntoView({ block: 'center' })")
        in_the_middle = "Math.abs(document.getElementsByName('memory')[0].getBoundingClientRect().top - 422) < 60"
        page.wait_for(in_the_middle)  # scrolling is smooth
        assert 0 < page.evaluate("document.querySelector('canvas').getBoundingClientRect().top") < 422
        assert page.problems == [] and page.evaluate(FITS)
