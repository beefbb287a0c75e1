"""How the processes of a run speak to each other beside torch: a small actor between the ranks and the driver.

Responsible for carrying messages from rank 0 to the driver, pulses of all ranks, orders back to them, and for the number
of the attempt: whoever speaks for an older one is told to stop. Not responsible for what is done about any of it
(events.py, launch.py). It lives on the driver's node, so that it is lost only together with the driver.
"""

import asyncio
import contextlib
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moco_ray.errors import UserError

PULSE_SECONDS = 1.0
TAKE_SECONDS = 0.5  # how long `take` waits for a message
ANSWER_SECONDS = 60.0  # the actor answers at once; only a network that is cut takes longer
FLUSH_SECONDS = 900.0  # the driver copies the record to object storage before it answers


class Pulse(NamedTuple):
    """The last that was heard of a rank."""

    step: int
    age_seconds: float


class Superseded(Exception):
    """This process speaks for an attempt that a newer one has replaced, or for a run that is stopped; it must end."""


class Mailbox:
    """The actor. Methods are coroutines on one loop, so they need no lock."""

    def __init__(self, next_attempt: int):
        self._attempt = next_attempt - 1
        self._messages: list[dict[str, Any]] = []  # numbered; kept until the driver says that it has them
        self._put_count = 0
        self._told, self._early = 0, {}  # of this attempt: how many were put, and those that overtook others
        self._came = asyncio.Event()
        self._flushes: dict[int, asyncio.Future] = {}
        self._flush_count = 0
        self._pulses: dict[int, tuple[int, float]] = {}  # step, and when it was heard
        self._orders: dict[str, Any] = {}
        self._ordered = asyncio.Event()
        self._fatal: BaseException | None = None

    async def begin(self) -> int:
        """A new attempt: its number. From now on nobody else is listened to."""
        self._attempt += 1
        self._pulses, self._orders, self._told, self._early = {}, {}, 0, {}
        return self._attempt

    async def tell(self, attempt: int, number: int, message: dict[str, Any]) -> bool:
        """The `number`-th message of rank 0 in this attempt. Calls may overtake each other: they are put in order."""
        if attempt != self._attempt:
            return False
        self._early[number] = message
        while self._told in self._early:
            self._put({**self._early.pop(self._told), "attempt": attempt})
            self._told += 1
        return True

    async def post(self, message: dict[str, Any]) -> None:
        """Of the controller or the driver, who speak for no attempt."""
        self._put({**message, "attempt": self._attempt})

    async def flush(self, attempt: int, number: int) -> UserError | str | None:
        """Wait until the driver has written all that was told before; None, or why it could not. "superseded" if it is."""
        self._flush_count += 1
        key, waiting = self._flush_count, asyncio.get_running_loop().create_future()
        self._flushes[key] = waiting
        if not await self.tell(attempt, number, {"flush": key}):
            return "superseded"
        return await waiting

    async def flushed(self, key: int, failure: UserError | None) -> None:
        waiting = self._flushes.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(failure)

    async def pulse(self, attempt: int, rank: int, step: int) -> dict[str, Any] | None:
        """What rank 0 is to do, or None for a process that is to end: of an older attempt, or of a run that is stopped."""
        if attempt != self._attempt or self._fatal is not None:
            return None
        self._pulses[rank] = (step, time.monotonic())
        return self._orders

    async def pulses(self) -> dict[int, Pulse]:
        now = time.monotonic()
        return {rank: Pulse(step, now - heard) for rank, (step, heard) in self._pulses.items()}

    async def changed(self, attempt: int, have: dict[str, Any]) -> None:
        """Return when there are other orders than `have`, or after PULSE_SECONDS."""
        if attempt == self._attempt and self._orders == have:
            self._ordered.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), PULSE_SECONDS)

    async def order(self, orders: dict[str, Any]) -> None:
        self._orders = {**self._orders, **orders}
        self._ordered.set()

    async def fail(self, attempt: int, error: BaseException) -> None:
        """The run cannot go on, whatever is started again: the driver is to raise this."""
        if attempt == self._attempt and self._fatal is None:
            self._fatal = error

    async def stop(self, error: BaseException) -> None:
        """The same, said by the driver or the controller."""
        self._fatal = self._fatal or error

    async def fatal(self) -> BaseException | None:
        return self._fatal

    async def take(self, have: int) -> list[dict[str, Any]]:
        """The messages after the number `have`, until which the driver has them; waits a moment for one."""
        self._messages = [message for message in self._messages if message["number"] > have]
        if not self._messages:
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), TAKE_SECONDS)
        return list(self._messages)

    def _put(self, message: dict[str, Any]) -> None:
        self._put_count += 1
        self._messages.append({**message, "number": self._put_count})
        self._came.set()


def start_board(next_attempt: int):
    """The actor, on this process's node. Returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_concurrency=1000)(Mailbox)
    return actor.options(scheduling_strategy=here).remote(next_attempt)


def new_attempt(board) -> int:
    """Begin one; its number."""
    return ray.get(board.begin.remote(), timeout=ANSWER_SECONDS)


class Wire:
    """One rank's end: tells, flushes, and gives a sign of life each second from a thread of its own."""

    def __init__(self, board, attempt: int, rank: int):
        self._board, self._attempt, self._rank = board, attempt, rank
        self.step = 0  # completed, of the loop; read by the thread
        self.orders: dict[str, Any] = {}
        self.superseded = False
        self._count, self._counting = 0, threading.Lock()  # messages told: the loop tells, and the saver's thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def tell(self, **message: Any) -> None:
        """Does not wait. Raises Superseded if a newer attempt has begun."""
        self.refuse_superseded()
        self._board.tell.remote(self._attempt, self._next(), message)

    def flush(self) -> None:
        """Wait until all that was told is in the storage. Raises the UserError that says why it is not."""
        failure = ray.get(self._board.flush.remote(self._attempt, self._next()), timeout=FLUSH_SECONDS)
        if failure == "superseded":
            self.superseded = True
        self.refuse_superseded()
        if failure is not None:
            raise failure

    def _next(self) -> int:
        with self._counting:
            self._count += 1
            return self._count - 1

    def fail(self, error: BaseException) -> None:
        """Say that no restart can help; returns when it is known."""
        ray.get(self._board.fail.remote(self._attempt, error), timeout=ANSWER_SECONDS)

    def refuse_superseded(self) -> None:
        if self.superseded:
            raise Superseded(f"attempt {self._attempt} has been replaced by a newer one, or stopped by the driver")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * PULSE_SECONDS)

    def _beat(self) -> None:
        while not self._stop.wait(0.0 if self._rank == 0 else PULSE_SECONDS):
            try:
                if self._rank == 0:  # it hears of orders at once
                    ray.get(self._board.changed.remote(self._attempt, self.orders), timeout=ANSWER_SECONDS)
                answer = ray.get(self._board.pulse.remote(self._attempt, self._rank, self.step), timeout=ANSWER_SECONDS)
            except (ray.exceptions.RayError, TimeoutError):
                self._stop.wait(PULSE_SECONDS)  # cut off, or the end: the loop's own errors tell
                continue
            if answer is None:
                self.superseded = True
                return
            self.orders = answer
