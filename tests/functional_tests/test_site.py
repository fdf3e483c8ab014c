"""The documentation as a site, in a browser: no page has an error or is wider than the screen, and its search finds."""

import os
import subprocess
import sys

import pytest

from support.browser import served
from support.launch import ROOT

# The playground needs Pyodide, and has a test of its own.
PAGES = sorted(
    {"", "contributing/", "from-scratch/", "404.html", *(f"{page.stem}/" for page in ROOT.glob("docs/*.md"))}
    - {"index/", "playground/"}
)
PHONE = 390, 844
# To the end and back, so that what follows the scrolling has run.
SCROLLED = """new Promise((done) => {
    scrollTo(0, document.body.scrollHeight);
    requestAnimationFrame(() => requestAnimationFrame(() => { scrollTo(0, 0); requestAnimationFrame(done); }));
})"""
PICTURES = "[...document.querySelectorAll('.md-content a.glightbox img')]"
# Tables that have to be swiped; and those that are shown row by row instead.
WIDE_TABLES = """[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(
    (table) => table.scrollWidth > table.clientWidth).length"""
ROWS = "document.querySelectorAll('table[data-rows]').length"
# What the keyboard has reached, which for the choice between light and dark is shown by its label, and its outline.
REACHED = """(() => {
    const reached = document.activeElement;
    const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(
        reached.matches('.md-option') ? reached.nextElementSibling : reached);
    return [!!reached.closest('.md-header, .md-tabs, .md-footer'), outlineStyle, outlineWidth, outlineColor];
})()"""
LINKS = "[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", folder]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    with served(folder) as address:
        yield address


@pytest.mark.parametrize(
    "words, found",
    [
        ("--sequence-splits", "/flags/ "),
        ("OOM", "/troubleshooting/ #out-of-memory-oom"),
        ("NaN", "/troubleshooting/ #the-loss-is-nan-or-infinite"),
        ("loss differs", "/troubleshooting/ #the-loss-differs-from-an-earlier-run"),
        ("hangs", "/troubleshooting/ #it-hangs-in-the-first-step"),
        ("ZB-V", "/schedules/ #names-from-papers-zb-v-zb-2p-dualpipe"),
        ("DualPipe", "/schedules/ #names-from-papers-zb-v-zb-2p-dualpipe"),
        ("cite", "/ #how-to-cite"),
    ],
)
def test_a_search_finds(words, found, site, page):
    page.open(f"{site}/?q={words}")
    page.wait_for(f"{LINKS}.length > 0")
    path, _, heading = found.partition(" ")
    links = page.evaluate(LINKS)
    assert any(path in link and link.endswith(heading) for link in links[:8]), links
    assert not page.problems, page.problems


def test_a_picture_opens_and_code_is_copied(site, page):
    page.open(f"{site}/planning/")
    blocks = page.evaluate("document.querySelectorAll('.highlight pre').length")
    page.wait_for(f"document.querySelectorAll('[data-clipboard-target]').length === {blocks}")
    assert blocks > 3 and page.evaluate("document.querySelectorAll('.highlight pre span.w').length > 3")
    page.evaluate("document.querySelector('.md-content a.glightbox').click()")
    page.wait_for("!!document.querySelector('.gslide-image img')?.complete")
    assert not page.problems, page.problems


def test_the_dark_site_is_dark(site, page):
    page.open(f"{site}/")
    background = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    light = page.evaluate(background)
    page.evaluate("document.querySelector('input[data-md-color-scheme=slate]').click()")
    page.wait_for(f"{background}[0] < 64")
    assert light == [255, 255, 255]


def test_the_keyboard_shows_what_it_has_reached(site, page):
    page.open(f"{site}/install/")
    page.evaluate("document.activeElement.blur()")
    places = set()
    for _ in range(40):
        page.press("Tab", 9)
        on_dark, *outline, colour = page.evaluate(REACHED)
        assert outline == ["solid", "2px"] and (colour == "rgb(255, 255, 255)") == on_dark
        places.add(on_dark)
    assert places == {True, False}


def test_a_wide_table_is_shown_row_by_row(site, page):
    """Its cells have the names of their columns, and lines of a cell become one; with room it is a table again."""
    page.resize(*PHONE)
    page.open(f"{site}/results/")
    page.wait_for(f"{ROWS} > 0")
    table = "[...document.querySelectorAll('table[data-rows]')].at(-1)"
    assert page.evaluate(f"getComputedStyle({table}.tHead).display") == "none"
    row = f"[...{table}.tBodies[0].rows[0].cells]"
    assert page.evaluate(f"{row}.map((cell) => cell.dataset.column)")[:3] == ["model: ", "sequences: ", "ours: "]
    assert page.evaluate(f"{row}[0].innerText").count(", ") == 1
    page.resize(1280, 1200)
    page.wait_for(f"{ROWS} === 0")
    assert page.evaluate("[...document.querySelectorAll('td:has(br)')].at(-1).innerText").count("\n") == 1


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_no_page_has_an_error_or_is_wider_than_the_screen(is_phone, site, page):
    """After the others, since the page stays as narrow as a phone."""
    assert len(PAGES) > 20
    if is_phone:
        page.resize(*PHONE)
    for name in PAGES:
        page.problems.clear()
        page.open(f"{site}/{name}")
        page.evaluate(SCROLLED)
        assert not page.problems, (name, page.problems)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        shown = page.evaluate(
            "getComputedStyle(document.querySelector('.tests th:last-child') ?? document.body).display"
        )
        assert (shown == "none") == (is_phone and name == "compatibility/")
        assert page.evaluate(WIDE_TABLES) == 0, name
        if is_phone:  # labels of pictures are as large as they were drawn: 6 points, 8 pixels
            narrowest = page.evaluate(f"Math.min(...{PICTURES}.map((each) => each.getBoundingClientRect().width))")
            assert narrowest is None or narrowest > 800, name
