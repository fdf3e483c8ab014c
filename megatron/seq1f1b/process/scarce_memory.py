"""Failures for want of memory. What failed functions still hold is let go, so that their rank can say why it ends."""

import errno
import re
import traceback

# What libraries say that cannot get memory, for data or for the stack of a thread.
_WORDS = re.compile(
    r"can't allocate memory|Cannot allocate memory|can't start new thread|bad_alloc|Resource temporarily unavailable"
)


def lacks_memory(error: BaseException) -> bool:
    """Whether the host, or the limit of this process, has no memory left; not whether a GPU has."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def let_go(error: BaseException) -> None:
    """Clear the variables of the functions that an error has ended, which its traceback keeps alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
