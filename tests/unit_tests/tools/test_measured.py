"""The page of what a GPU has shown, with and without figures."""

import json

import pytest

import measured


def result(**more) -> dict:
    """What scripts/gpu_test.sh writes, in a few figures."""
    stage = [
        {"table": "stage", "length": 16384, "segments": 1, "out_of_memory": True},
        *(
            {
                "table": "stage",
                "length": 16384,
                "segments": k,
                "seconds_per_sequence": 0.125 * k,
                "issued_share": 0.96,
                "tokens_per_second": 131072 / k,
                "peak_gib": 12 / k,
                "reserved_gib": 14.0,
            }
            for k in (2, 4)
        ),
    ]
    prediction = {
        "table": "prediction",
        "machine": "h100-80gb",
        "length": 16384,
        "segments": 2,
        "seconds_per_sequence": 0.25,
        "predicted_seconds": 0.2,
        "peak_gib": 6.0,
        "predicted_gib": 6.6,
    }
    checks = [
        {"name": "first", "passed": True, "found": "a | b"},
        {"name": "second", "passed": False, "found": "1.7 times"},
        {"name": "third", "passed": None, "found": "not run: time"},
    ]
    training = {"table": "training", "on": "one GPU", "run": "4 segments", "tokens": 8192, "losses": [5.5, 2.25]}
    training |= {"norms": [4.0], "tokens_per_second": 70000.0}
    versions = {"table": "versions", "PyTorch": "2.11.0"}
    ceilings = {"table": "ceilings", "product_tflops": 650.4, "copy_gb_per_s": 2600.0, "link_gb_per_s": 48.2}
    figures = [versions, ceilings, *stage, prediction, training]
    section = {"title": "all of it", "checks": checks, "figures": figures}
    return {"date": "2027-01-31", "device": "1 x NVIDIA H100", "tiny": False, "sections": [section]} | more


def test_figures_become_tables():
    page = measured.page_of(result())
    assert "Measured on 2027-01-31, on 1 x NVIDIA H100." in page and "| PyTorch | 2.11.0 |" in page
    assert "reaches 650 TFLOPS in bf16, a copy on the card 2,600 GB/s" in page
    assert "| 16,384 | 1 | out of memory |  |  |  |  |" in page
    assert "| 16,384 | 4 | 0.500 | 96% | 32,768 | 3.00 | 14.0 |" in page
    assert "| 16,384 | 2 | 0.250 | 0.200 | -20 % | 6.00 | 6.60 | +10 % | h100-80gb |" in page
    assert "| one GPU | 4 segments | 8,192 | 5.5000 | 2.2500 | 4.0000 | 70,000 |" in page
    assert "Checks: 1 ok, 1 FAILED, 1 not run." in page
    # Failures first; a bar would end a cell.
    assert page.index("| FAILED | second |") < page.index("| ok | first | a / b |") < page.index("| not run | third |")
    assert "## Attention" not in page  # there is no figure of it


@pytest.mark.parametrize("name", ["measured", "measured-h200"])
def test_a_page_is_that_of_the_figures_that_are_kept(name):
    kept = json.loads((measured.DOCS / f"{name}.json").read_text(encoding="utf-8"))
    assert (measured.DOCS / f"{name}.md").read_text(encoding="utf-8") == measured.page_of(kept, name)
    assert (measured.DOCS / "images" / f"{name}.svg").exists() == bool(measured.drawn(kept))


def test_a_column_without_a_figure_is_left_out_with_its_note():
    untimed = {"table": "experts", "length": 16384, "segments": 2, "seconds_per_sequence": 0.5}
    timed = untimed | {"seconds_as_sequences": 0.25}
    sections = [{"checks": [], "figures": [untimed]}]
    result = {"date": "2026-08-01", "device": "1 x H100", "sections": sections}
    assert "sequences" not in measured.page_of(result).replace("s a sequence", "")
    sections[0]["figures"].append(timed)
    page = measured.page_of(result)
    assert "| 16,384 | 2 | 0.500 | 0.250 |" in page and "*As short sequences*: " in page


def test_without_figures_the_page_says_so():
    assert "There is no measurement yet" in measured.page_of(None)


@pytest.fixture
def docs(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(measured, "DOCS", tmp_path)
    return tmp_path


def test_a_file_becomes_the_page_and_its_picture(docs):
    pytest.importorskip("matplotlib")
    given = docs / "gpu_test.json"
    given.write_text(json.dumps(result()))
    measured.main([str(given)])
    page = (docs / "measured.md").read_text()
    assert page == measured.page_of(result()) and "<svg" in (docs / "images" / "measured.svg").read_text()
    given.unlink()
    measured.main([])  # from the copy
    assert (docs / "measured.md").read_text() == page


@pytest.mark.parametrize("figures", [[], [{"table": "stage", "length": 16384, "segments": 1, "out_of_memory": True}]])
def test_a_page_without_a_stage_has_no_picture(docs, figures):
    given = docs / "gpu_test.json"
    checks = [{"name": "first", "passed": True, "found": "0"}]
    given.write_text(json.dumps(result(sections=[{"title": "a", "checks": checks, "figures": figures}])))
    (docs / "images" / "measured.svg").touch()  # of an earlier visit
    measured.main([str(given)])
    assert "measured.svg" not in (docs / "measured.md").read_text() and not (docs / "images" / "measured.svg").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        (json.dumps(result(device="CPU")), "sizes that measure nothing"),
        (json.dumps(result(tiny=True)), "sizes that measure nothing"),
        ("{}", "gpu_test.json: 'date' is missing; give a file that scripts/gpu_test.sh has written"),
        (
            json.dumps(result(sections=[{"title": "a", "checks": [{"name": "a"}], "figures": []}])),
            r"sections\[0\].checks\[0\]: 'pass",
        ),
        (
            json.dumps(result(sections=[{"title": "a", "checks": [], "figures": [{"table": [{}]}]}])),
            r"sections\[0\].figures\[0\]",
        ),
        ("[", "gpu_test.json: line 1: it is not JSON"),
        (None, "gpu_test.json: No such file or directory; give"),
    ],
    ids=["cpu", "tiny", "empty", "check", "figure", "cut", "missing"],
)
def test_a_file_that_measures_nothing_is_refused(docs, content, words):
    given = docs / "gpu_test.json"
    if content is not None:
        given.write_text(content)
    with pytest.raises(SystemExit, match=words):
        measured.main([str(given)])
    assert not (docs / "measured.md").exists() and not (docs / "measured.json").exists()


def test_of_a_section_that_ran_twice_the_last_counts(docs):
    first = docs / "first.json"
    first.write_text(json.dumps(result(date="2027-01-30")))
    again = docs / "again.json"
    checks = [{"name": "second", "passed": True, "found": "1.1 times"}]
    other = {"title": "another", "checks": [], "figures": []}
    again.write_text(json.dumps(result(sections=[{"title": "all of it", "checks": checks, "figures": []}, other])))
    measured.main([str(first), str(again)])
    assert (
        "Measured on 2027-01-31" in (docs / "measured.md").read_text()
        and "Checks: 1 ok." in (docs / "measured.md").read_text()
    )
    first.write_text(json.dumps(result(device="1 x NVIDIA A100")))
    with pytest.raises(SystemExit, match="the files are of 1 x NVIDIA A100 and of 1 x NVIDIA H100; give those of one"):
        measured.main([str(first), str(again)])
