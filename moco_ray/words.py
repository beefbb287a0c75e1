"""How durations, sizes and moments are said to a person, and a text as a whole. Not here: what is said about a run."""

import math
import os
import sys
from typing import TextIO


def say(text: str, out: TextIO | None = None) -> None:
    """Print it, on stdout if not told where, to a reader that may leave before the end as `| head` does."""
    out = out or sys.stdout
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def note(text: str, out: TextIO | None = None) -> None:
    """What goes on, on stderr if not told where: no work ends because its reader has left, or the disk of its log is full."""
    try:
        say(text, out or sys.stderr)
    except OSError:
        pass


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    if not math.isfinite(seconds):
        return "?"
    minutes, left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def age(seconds: float) -> str:
    """Of something that happened so long ago, in its largest unit: "12 s", "3 min", "5 h", "9 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= (2 * size if unit != "min" else size):  # 36 hours tell more than one day
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(count: int) -> str:
    """Of so many bytes, in powers of ten: "64 MB"."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}" if count < 10 ** (power + 1) else f"{count / 10**power:.0f} {unit}"
    return f"{count} B"


def plural(count: int, one: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
