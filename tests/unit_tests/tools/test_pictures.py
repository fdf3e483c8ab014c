"""The pictures of schedules in the docs are those that are drawn now."""

import re

import pytest

import pictures

SVG = [name for name in pictures.PICTURES if name.endswith(".svg")]


@pytest.mark.parametrize("name", SVG)
def test_a_picture_of_the_docs_is_drawn_as_now(name, tmp_path):
    """By the texts in it: titles, legend, numbers of micro-batches, sequences held and bubble ratios."""
    pytest.importorskip("matplotlib")
    pictures.draw(name, tmp_path)
    drawn, there = (re.findall("<!-- (.*) -->", (folder / name).read_text()) for folder in (tmp_path, pictures.IMAGES))
    assert drawn == there and "sequences held, bubble" in drawn


def test_the_word_of_all_pictures_is_bubble():
    """Of traced steps, too, which are not drawn anew."""
    for path in pictures.IMAGES.glob("*.svg"):
        assert "<!-- idle -->" not in path.read_text(), path.name
