"""Device code of one architecture, in a library made by hand."""

import importlib.util
import lzma
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from support.fat_binaries import LIBRARY, SASS, fat_binary

PATH = Path(__file__).parents[3] / "scripts" / "one_architecture.py"
SPEC = importlib.util.spec_from_file_location("one_architecture", PATH)
one_architecture = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(one_architecture)


def test_code_of_other_gpus_becomes_zeros():
    content = bytearray(LIBRARY)
    sizes = one_architecture.keep_architecture(content, 90)
    assert sizes == {"sm_80": 64, "sm_90": 192, "PTX for_90": 32}
    assert len(content) == len(LIBRARY)
    expected = LIBRARY.replace(b"a" * 64, bytes(64)).replace(b"p" * 32, bytes(32))
    assert bytes(content) == expected


def test_a_wheel_becomes_a_compressed_library(tmp_path, monkeypatch, capsys):
    wheel, output = tmp_path / "nccl.whl", tmp_path / "libnccl.so.2.xz"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("nvidia/nccl/lib/libnccl.so.2", LIBRARY)
    monkeypatch.setattr(sys, "argv", ["one_architecture.py", str(wheel), str(output), "90"])
    one_architecture.main()
    assert b"H" * 128 in lzma.decompress(output.read_bytes()) and "sm_90" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, architecture, words",
    [
        ("nvidia/nccl/lib/libnccl.so.2", "100", "no code for sm_100, but for PTX for_90, sm_80, sm_90"),
        ("nvidia/nccl/lib/other.so", "90", "has no libnccl.so.2"),
    ],
)
def test_what_cannot_be_packed_is_told(tmp_path, monkeypatch, name, architecture, words):
    wheel = tmp_path / "nccl.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(name, LIBRARY)
    monkeypatch.setattr(sys, "argv", ["one_architecture.py", str(wheel), str(tmp_path / "out.xz"), architecture])
    with pytest.raises(SystemExit, match=words):
        one_architecture.main()
    assert not (tmp_path / "out.xz").exists()


def test_code_of_another_form_is_refused():
    content = bytearray(fat_binary((SASS, 90, b"h" * 64)))
    struct.pack_into("<I", content, 16 + 4, 1 << 20)  # the size of the entry's header
    with pytest.raises(ValueError, match="another form"):
        one_architecture.keep_architecture(content, 90)
