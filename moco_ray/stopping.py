"""What SIGTERM does to a driver: `ray job stop`, Kubernetes and batch systems send it some seconds before they kill.

Responsible for the signals of the driver's process. Not responsible for the last checkpoint (desk.py asks the workers for it).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from moco_ray.errors import Stopped


@contextlib.contextmanager
def stoppable(ask: Callable[[], bool]) -> Iterator[None]:
    """While it is open, SIGTERM calls `ask()`, in a thread: it answers whether the run will end by itself, soon.

    Otherwise, and at a second SIGTERM, the main thread is interrupted as by Ctrl-C, and this raises Stopped. In another thread than
    the main one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []

    def end() -> None:
        if not ask():
            os.kill(os.getpid(), signal.SIGINT)

    def hear(number: int, _) -> None:
        told.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell's script starts with `&` is born so
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if len(told) == 1:
            threading.Thread(target=end, name="stop", daemon=True).start()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    except KeyboardInterrupt:
        if told:
            raise Stopped("stopped by SIGTERM; the same command goes on from the newest checkpoint") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if interrupt is signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)


@contextlib.contextmanager
def same_interrupt() -> Iterator[None]:
    """What SIGINT does is as before when this ends: Ray Train's answer to it stays, and later would make a Ctrl-C a success."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
