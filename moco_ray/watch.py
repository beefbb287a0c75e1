"""`moco-ray watch`: a run on a terminal, drawn anew as it goes on, on any machine that can read its storage.

Responsible for when it is read and drawn, and for leaving the terminal as it was. Not responsible for what is drawn (frame.py).
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from moco_ray.errors import StorageFailing
from moco_ray.frame import ALARM, Line, frame
from moco_ray.record import Record, State
from moco_ray.runs import WATCH_SECONDS, watched

DISK_SECONDS = 2.0  # between two readings
STORAGE_SECONDS = 10.0  # the same in object storage, where each is some requests
OTHER_SCREEN, OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
TOP, END_OF_LINE, REST = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(place: str, once: bool, out: TextIO | None = None) -> None:
    """Draw the run until it is finished or Ctrl-C; with `once` a single time. Raises UserError if there is no such run.

    Where `out` is no terminal, one frame follows the other, without a terminal's codes.
    """
    out = out or sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # of a terminal that has no such letters
    record = Record.of(place, end=True)
    try:
        if once:
            _print(_lines(record, record.state(watched([record]).get(record.folder.place))), out)
        else:
            _follow(record, out)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _follow(record: Record, out: TextIO) -> None:
    """Until the run is finished."""
    pause = DISK_SECONDS if record.folder.store.is_local else STORAGE_SECONDS
    beaten, content, lines = time.monotonic(), record.sign and record.sign.content, []
    try:
        with _screen(out) as draw:
            while True:
                if content != (record.sign and record.sign.content):
                    beaten, content = time.monotonic(), record.sign and record.sign.content
                silent = time.monotonic() - beaten
                state = record.state(silent if silent > WATCH_SECONDS else None)
                lines = _lines(record, state)
                draw(lines)
                if state.word == "finished":
                    return
                time.sleep(pause)
                try:
                    record.refreshed()
                except StorageFailing as error:  # it may come back
                    draw([Line(str(error), ALARM), *lines])
    finally:
        if out.isatty():
            _print(lines, out)  # it stays to be read


def _lines(record: Record, state: State) -> list[Line]:
    return frame(record, state, time.time(), shutil.get_terminal_size().columns)


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator:
    """A function that draws a frame: over the one before on a terminal's other screen; else below it."""
    if not out.isatty():
        yield lambda lines: _print([*lines, Line("")], out)
        return

    def draw(lines: list[Line]) -> None:
        rows = shutil.get_terminal_size().lines
        out.write(TOP + "\n".join(_styled(line) + END_OF_LINE for line in lines[:rows]) + REST)
        out.flush()

    out.write(OTHER_SCREEN)
    try:
        yield draw
    finally:
        out.write(OWN_SCREEN)
        out.flush()


def _print(lines: list[Line], out: TextIO) -> None:
    styled = out.isatty()
    out.write("".join(f"{_styled(line) if styled else line.text}\n" for line in lines))
    out.flush()


def _styled(line: Line) -> str:
    return f"\x1b[{line.style}m{line.text}\x1b[0m" if line.style else line.text
