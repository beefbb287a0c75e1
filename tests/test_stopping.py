"""What SIGTERM and SIGINT do to a driver, without Ray: real signals to this process."""

import os
import signal
import threading
import time

import pytest

from moco_ray.errors import Stopped
from moco_ray.stopping import same_interrupt, stoppable


def signalled(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def interruptible():
    """As at a terminal, however these tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def until(happened, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_run_that_ends_by_itself_is_asked_once_and_not_interrupted():
    asked, before = [], signal.getsignal(signal.SIGTERM)
    with stoppable(lambda: asked.append(threading.current_thread().name) or True):
        signalled(signal.SIGTERM)
        until(lambda: asked)
        time.sleep(0.05)
    assert asked == ["stop"] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signals, ends", [(1, False), (2, True)])
def test_without_workers_at_work_or_asked_twice_the_main_thread_is_interrupted_and_the_run_stopped(signals, ends):
    with pytest.raises(Stopped, match="goes on from the newest checkpoint"), stoppable(lambda: ends):
        for _ in range(signals):
            signalled(signal.SIGTERM)
        until(lambda: False)
        raise AssertionError("nothing interrupted it")


def test_a_process_born_deaf_to_ctrl_c_is_stopped_too_and_stays_deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(Stopped), stoppable(lambda: False):
        signalled(signal.SIGINT)
        signalled(signal.SIGTERM)
        until(lambda: False)
        raise AssertionError("nothing interrupted it")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_alone_stays_an_interrupt():
    with pytest.raises(KeyboardInterrupt), stoppable(lambda: True):
        signalled(signal.SIGINT)
        until(lambda: False)


def test_an_answer_to_ctrl_c_that_somebody_sets_does_not_outlive_the_block():
    before = signal.getsignal(signal.SIGINT)
    with same_interrupt():
        signal.signal(signal.SIGINT, lambda *_: None)
    assert signal.getsignal(signal.SIGINT) is before
