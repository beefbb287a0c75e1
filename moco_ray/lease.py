"""One driver at a time: a lease on a run, in the run's own storage.

The holder changes `lease.json` every few seconds. Another start takes it over if the holder's process is gone from this
machine, or if the lease did not change for a while by the newcomer's own clock: two machines' clocks are never compared.
Responsible for that, and for telling a holder that it was taken over. What a holder that was cut off still writes is
checkpoint.py's to disbelieve; how an object is replaced by one process only is data/conditional.py's.
"""

import contextlib
import json
import os
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from moco_ray.data.conditional import Held, conditional
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.ray_job import own_job

NAME = "lease.json"
BEAT_SECONDS = 5.0
EXPIRES_SECONDS = 30.0
CONTENT_BYTES = (
    1024  # always the same: who asks for the size, and then for so many bytes of the next beat, has it whole
)
SETTLE_SECONDS = 2.0  # where two may write at once: the time that the slower one is given


class Sign(NamedTuple):
    """What a lease shows of who carries a run, without touching it."""

    holder: str
    content: bytes  # other bytes at each beat
    released: bool  # the holder let go of the run
    alive: bool | None  # by the processes of this machine; None: it ran elsewhere, and only watching the beats can tell


def sign_of_life(run: Store) -> Sign | None:
    """The lease of a run as it lies there; None if there is none. Raises UserError if it cannot be read."""
    if run.size(NAME) is None:
        return None
    content = run.read(NAME)
    facts = _parsed(Held(content, ""))
    return Sign(_holder(facts), content, bool(facts.get("released")), not _ended_here(facts) if _here(facts) else None)


class Lease:
    """`with Lease.acquire(run, told) as lease:` holds a run until the block ends or `lease.lost` is set.

    `certain` is False where the storage cannot refuse the second of two that write at once; then two may hold the run
    for as long as a beat.
    """

    def __init__(self, run: Store, beat_seconds: float, expires_seconds: float, settle_seconds: float):
        self.lost = threading.Event()
        self.reason = ""  # why it was lost
        self._run, self._beat_seconds, self._settle_seconds = run, beat_seconds, settle_seconds
        self._stale_seconds = expires_seconds / 2
        self._beaten, self._lock = 0.0, threading.Lock()  # when the last beat that came about began
        self._object = conditional(run, NAME)
        self.certain = self._object.certain
        self._facts = {**_this_process(), "id": uuid.uuid4().hex, "beat": 0, "released": False}
        self._mine: Held | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @classmethod
    def acquire(
        cls,
        run: Store,
        told: Callable[[str], None],
        *,
        beat_seconds: float = BEAT_SECONDS,
        expires_seconds: float = EXPIRES_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> "Lease":
        """Hold the run for this process, from now on. `told` gets a line before it waits, and at a takeover.

        Raises UserError if another process carries the run, and if the storage fails.
        """
        lease = cls(run, beat_seconds, expires_seconds, settle_seconds)
        before = lease._object.read()
        other = _parsed(before)
        if before and not other.get("released"):
            if _ended_here(other):
                told(f"taking over {run.place('')} from {_holder(other)}, which has ended")
            else:
                before = lease._watch(before, told, expires_seconds)
        lease._claim(before)
        lease._thread.start()
        return lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Let the next start have the run at once. If the storage fails now, it has to wait until the lease expires."""
        self._ended.set()
        self._thread.join(self._beat_seconds + self._settle_seconds)
        if self._thread.is_alive() or self.lost.is_set():
            return
        try:
            self._object.replace(self._content(released=True), self._mine)
        except UserError:
            pass  # the storage is away; nothing is lost but the next start's time

    def confirm(self) -> None:
        """Raise UserError if the run is another's by now. Call it before writing into the run.

        Asks the storage only if no beat came about for half the time after which another takes over: a process that was
        stopped, or whose machine slept, wakes up in the belief that the run is still its own. A storage that
        does not answer tells nothing, for or against.
        """
        if not self.lost.is_set() and _seconds() - self._beaten > self._stale_seconds:
            with contextlib.suppress(UserError):
                self._beat()
        if self.lost.is_set():
            raise UserError(self.reason)

    def _content(self, **changes: Any) -> bytes:
        self._facts |= changes
        return json.dumps(self._facts, indent=1).ljust(CONTENT_BYTES).encode()

    def _watch(self, before: Held, told: Callable[[str], None], expires_seconds: float) -> Held:
        """Wait until the lease has not changed for so long. Raises UserError if it changes in the hands of a holder."""
        place, holder = self._run.place(""), _holder(_parsed(before))
        told(f"{place} was carried by {holder}; waiting up to {expires_seconds:g} s to see whether it still is")
        end = time.monotonic() + expires_seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._beat_seconds / 5))
            now = self._object.read()
            if now is None or _parsed(now).get("released"):
                return now
            if now != before:
                raise self._carried(now)
        told(f"taking over {place} from {holder}, not heard of for {expires_seconds:g} s")
        return before

    def _claim(self, before: Held | None) -> None:
        """Write the lease in place of what was seen. Raises UserError if another did so first."""
        self._beaten = _seconds()
        self._mine = self._object.replace(self._content(), before)
        if self._mine and not self.certain:
            time.sleep(self._settle_seconds)
        if self._mine is None or (not self.certain and self._object.read() != self._mine):
            raise self._carried(self._object.read())

    def _carried(self, held: Held | None) -> UserError:
        facts = _parsed(held)
        job = _job(facts)
        end = f"end it with `ray job stop {job}` at its cluster" if job else "stop it there"
        return UserError(f"{self._run.place('')} is being carried by {_holder(facts)}; wait for it, or {end}")

    def _renew(self) -> None:
        """Change the lease at each beat, until the end or until it is another's."""
        while not self._ended.wait(self._beat_seconds) and not self.lost.is_set():
            with contextlib.suppress(UserError):  # others cannot read it now either: not lost, and tried again at the next beat
                self._beat()

    def _beat(self) -> None:
        """Change the lease once, or find that it is another's. Raises UserError if the storage does not answer."""
        with self._lock:
            if self.lost.is_set():
                return
            began = _seconds()
            mine = self._object.replace(self._content(beat=self._facts["beat"] + 1), self._mine)
            held = mine or self._object.read()
            if mine is None and _parsed(held).get("id") != self._facts["id"]:
                self.reason = (
                    f"{self._run.place('')} was taken over by {_holder(_parsed(held))}; this process no longer carries the run"
                    if held
                    else f"{self._run.place(NAME)} was removed; this process no longer carries the run"
                )
                self.lost.set()
                return
            self._mine = held  # ours also where a beat of before arrived late
            self._beaten = began


def _seconds() -> float:
    """Of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _this_process() -> dict[str, Any]:
    """What names this process, and tells another on this machine whether it still runs."""
    return {
        "holder": f"process {os.getpid()} on {socket.gethostname()}",
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "process_start": _start_of(os.getpid()),
        **({"job": job} if (job := own_job()) else {}),
    }


def _here(other: dict[str, Any]) -> bool:
    """Whether it ran on this machine, among the processes that we see."""
    here = (_boot(), _pid_namespace())
    return all(here) and here == (other.get("boot"), other.get("pid_namespace")) and bool(other.get("process_start"))


def _ended_here(other: dict[str, Any]) -> bool:
    """Whether it ran on this machine, among the processes that we see, and is there no more."""
    return _here(other) and _start_of(other.get("pid")) != other["process_start"]


def _boot() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: Any) -> str:
    """When the process began, in the kernel's ticks since boot; "" if it has ended, also if nobody noticed yet (Z)."""
    state, *fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["Z"]  # its name may hold spaces
    return "" if state in "ZX" else fields[18]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _parsed(held: Held | None) -> dict[str, Any]:
    """The lease's fields; {} for what is none."""
    try:
        found = json.loads(held.content) if held else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _job(facts: dict[str, Any]) -> str:
    """Of a holder within a Ray job, as the shell takes it; "" of others, and of earlier releases."""
    return shlex.quote(facts["job"]) if isinstance(facts.get("job"), str) and facts["job"] else ""


def _holder(facts: dict[str, Any]) -> str:
    job = f" (Ray job {facts['job']})" if _job(facts) else ""
    return str(facts.get("holder") or "an unknown process") + job
