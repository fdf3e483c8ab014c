"""What the docs' playground shows is what the package makes, and its archive has all that a browser needs."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from playground import CUTS, MOST_ACTIONS, Settings, answer, costs, cut

import site_hook
from megatron.seq1f1b.schedule import FAMILY_NAMES, Costs, build, peak_memory, simulate


def shown(**settings) -> dict:
    return json.loads(answer(json.dumps(settings)))


@pytest.mark.parametrize("placement, chunks", [("looped", 1), ("looped", 2), ("v", 2)])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_panel_is_the_schedule_of_its_family(family, placement, chunks):
    changes = {"family": family, "placement": placement, "chunks": chunks, "microbatches": 5, "message": 0.2}
    settings = Settings(**changes)
    given = Costs.from_mapping(settings.shape, costs(settings))
    schedule = build(family, settings.shape, given)
    panel, _ = shown(**changes)["panels"]
    assert panel["time"] == simulate(schedule, given).makespan and panel["memory"] == peak_memory(schedule, given)
    for boxes in panel["ranks"]:
        assert sum(end - start for *_, start, end in boxes) == pytest.approx(3 * 5)
    panel, plain = shown(**changes | {"message": 0})["panels"]
    assert panel["time"] * (1 - panel["bubble_ratio"]) == pytest.approx(3 * 5)
    assert plain["time"] == pytest.approx(3 * (5 + 4 - 1)) and plain["memory"] == pytest.approx([4, 3, 2, 1])


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_balanced_cuts_have_equal_times_even_ones_equal_lengths(share):
    for strategy in CUTS:
        settings = Settings(cut=strategy, attention=share, segments=5)
        ends = cut(settings)
        assert ends[0] == 0 and ends[-1] == pytest.approx(1)
        values = Costs.from_mapping(settings.shape, costs(settings))
        equal = values.f[0] if strategy == "balanced" else values.activation[0]
        assert equal == pytest.approx([1 / 5] * 5)


def test_auto_uses_the_memory_that_it_is_given():
    panel, plain = shown(attention=0)["panels"]  # the figure of the README
    assert (round(panel["bubble_ratio"], 2), round(plain["bubble_ratio"], 2), panel["memory"][0]) == (0.16, 0.43, 7 / 4)
    tight, wide = (shown(family="auto", memory=memory)["panels"][0] for memory in (1, 2))
    peak = max(shown()["panels"][0]["memory"]) + 1e-9
    assert max(tight["memory"]) <= peak < max(wide["memory"]) <= 2 * peak and wide["time"] < tight["time"]


def test_what_cannot_be_shown_is_a_sentence():
    sentence = f"49,152 actions are too many for a page, which draws {MOST_ACTIONS:,}: take fewer segments"
    assert shown(ranks=64, microbatches=64)["error"].startswith(sentence)
    assert "unknown cut" in shown(cut="uniform")["error"] and "unknown schedule" in shown(family="2f2b")["error"]


def test_the_archive_of_the_site_needs_nothing_else(tmp_path):
    (tmp_path / "playground").mkdir()
    site_hook.on_post_build(SimpleNamespace(site_dir=tmp_path))
    shutil.unpack_archive(tmp_path / "playground" / "schedule.zip", tmp_path)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom playground import answer\n"
    program += 'print(answer(\'{"family": "auto"}\'))'
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == shown(family="auto")
