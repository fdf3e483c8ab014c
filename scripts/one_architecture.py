"""Keep the device code of one architecture of NCCL, so that the library can be carried to a machine without a network.

    python scripts/one_architecture.py nvidia_nccl_cu13-2.30.7-....whl libnccl.so.2.xz 90

takes the library from NVIDIA's wheel (250 MB), fills the code of all GPUs but those of compute capability 9.0 with
zeros, and compresses the result (40 MB). Sizes and offsets stay, so the library loads as before.

Device code lies in fat binaries, wherever they are in the file: a header (magic number, version, its own size, the size
of what follows), then one entry for each architecture (kind, version, size of its header, size of its code, the
architecture at byte 28). cuobjdump of the CUDA toolkit lists the same.
"""

import argparse
import lzma
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARY = "libnccl.so.2"
MAGIC = struct.pack("<I", 0xBA55ED50)
FILE_HEADER = struct.Struct("<IHHQ")  # magic number, version, size of this header, size of the entries
ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, size of this header, size of the code
ARCHITECTURE = struct.Struct("<I")
ARCHITECTURE_OFFSET = 28
SASS = 2  # the kind of entries with machine code; others hold PTX, which would be compiled for any GPU
LARGEST_HEADER = 4096


class Entry(NamedTuple):
    """Code in a file: where it is, what it is, and for which GPUs (90 for compute capability 9.0)."""

    start: int
    size: int
    kind: int
    architecture: int


def entries(content: bytearray) -> Iterator[Entry]:
    """All device code of a library."""
    place = content.find(MAGIC)
    while place >= 0:
        _, version, header_size, size = FILE_HEADER.unpack_from(content, place)
        end = place + header_size + size
        is_fat_binary = version == 1 and header_size == FILE_HEADER.size and end <= len(content)
        if is_fat_binary:
            yield from _entries_between(content, place + header_size, end)
        place = content.find(MAGIC, end if is_fat_binary else place + len(MAGIC))


def _entries_between(content: bytearray, place: int, end: int) -> Iterator[Entry]:
    while place < end:
        kind, _, header_size, size = ENTRY_HEADER.unpack_from(content, place)
        (architecture,) = ARCHITECTURE.unpack_from(content, place + ARCHITECTURE_OFFSET)
        start = place + header_size
        if header_size > LARGEST_HEADER or start + size > end:
            raise ValueError(f"the device code at byte {place} has another form than this script knows")
        yield Entry(start, size, kind, architecture)
        place = start + size


def keep_architecture(content: bytearray, architecture: int) -> Counter[str]:
    """Fill the code of other architectures with zeros, in place. The bytes of code by architecture, before that. Raises
    ValueError if there is none of this one."""
    sizes: Counter[str] = Counter()
    for entry in list(entries(content)):
        name = f"{'sm' if entry.kind == SASS else 'PTX for'}_{entry.architecture}"
        sizes[name] += entry.size
        if (entry.kind, entry.architecture) != (SASS, architecture):
            content[entry.start : entry.start + entry.size] = bytes(entry.size)
    if f"sm_{architecture}" not in sizes:
        raise ValueError(f"there is no code for sm_{architecture}, but for {', '.join(sorted(sizes)) or 'none'}")
    return sizes


def library_in(wheel: Path) -> bytearray:
    """NCCL in NVIDIA's wheel. Raises ValueError if it has none."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.endswith(f"/{LIBRARY}"):
                return bytearray(packed.read(name))
    raise ValueError(f"{wheel} has no {LIBRARY}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of nvidia-nccl-cu13, or of another CUDA")
    parser.add_argument("output", type=Path, help="the library, compressed: a .xz")
    parser.add_argument("architecture", type=int, help="90 for Hopper, 80 for A100")
    args = parser.parse_args()
    try:
        content = library_in(args.wheel)
        sizes = keep_architecture(content, args.architecture)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SystemExit(f"error: {error}") from error
    args.output.write_bytes(lzma.compress(content, preset=6))
    found = ", ".join(f"{name} {size >> 20} MiB" for name, size in sorted(sizes.items()))
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB, of {found}")


if __name__ == "__main__":
    main()
