"""A library with device code for several GPUs, in the form of NVIDIA's fat binaries, made by hand."""

import struct

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX = 1
SASS = 2


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    """Kind, architecture and content of each."""
    entries = b""
    for kind, architecture, code in codes:
        header = struct.pack("<HHIQ", kind, 1, 32, len(code))
        entries += header + bytes(12) + struct.pack("<I", architecture) + code
    return MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries


LIBRARY = b"".join(
    [
        b"host code" + MAGIC + bytes(40),  # the number by chance
        fat_binary((SASS, 80, b"a" * 64), (SASS, 90, b"h" * 64), (PTX, 90, b"p" * 32)),
        b"more host code",
        fat_binary((SASS, 90, b"H" * 128)),
        b"the end",
    ]
)
