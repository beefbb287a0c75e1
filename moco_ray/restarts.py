"""Between a failure of the workers and the next start: what is said of it, and whether there is one.

Runs in Ray Train's controller: beside launch.py, train_worker.py and process_group.py the only place that knows Ray Train. Not
responsible for starting anything (launch.py) nor for the words of events (events.py).
"""

import logging
import time

import ray
import ray.train

from moco_ray.cluster import living, recount, wait_until_noticed
from moco_ray.errors import StorageFailing, UserError
from moco_ray.events import DIED
from moco_ray.saver import OUTAGE_SECONDS

FAILURES = 5  # in a row without a step forward: then the run stops, for it is not the machines
NOTICED_SECONDS = 30.0  # for Ray's head to notice that a node is gone
# Parts of what gloo and NCCL say on a rank whose peer is gone
OF_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")


class Guard(ray.train.UserCallback):
    """In Ray Train's controller, between a failure of workers and the decision what is started again.

    An exception here ends the run at once: that is how a mistake that no restart cures does.
    """

    def __init__(self, board, nodes: set[str]):
        """`nodes`: ids of those that live now."""
        self._board, self._nodes = board, nodes
        self._best, self._failures, self._last = 0, 0, -1
        self._failing_since: float | None = None  # a storage, and no step since

    def after_exception(self, run_context, worker_exceptions: dict[int, Exception]) -> None:
        """Ray Train calls it with rank -> exception. Raises to end the run; returns to have the workers started again."""
        causes = {rank: one_line(error) for rank, error in worker_exceptions.items()}
        ray.get(self._board.post.remote({"kind": "failed", "causes": causes}))
        fatal = ray.get(self._board.fatal.remote())
        if fatal is None and not self._lost_a_machine():
            fatal = self._give_up(worker_exceptions, causes)
        if fatal is not None:
            ray.get(self._board.stop.remote(fatal))
            raise RuntimeError("the run cannot go on; the driver tells why")

    def _lost_a_machine(self) -> bool:
        """Whether that was it. Waits until Ray knows, so that the workers are started on what is left."""
        try:
            wait_until_noticed(NOTICED_SECONDS)
            before, self._nodes = self._nodes, set(living())
            recount()
            return not before <= self._nodes
        except Exception:  # whatever it is, here it would end the run, and it only makes the restart slower
            logging.getLogger(__name__).warning("Ray Train may restart with an old view of the cluster", exc_info=True)
            return False

    def _give_up(self, errors: dict[int, Exception], causes: dict[int, str]) -> UserError | None:
        """What ends the run, if it has failed too often without a step forward."""
        reached = max((pulse.step for pulse in ray.get(self._board.pulses.remote()).values()), default=0)
        if reached > self._best:
            self._best, self._failures = reached, 0
        if reached != self._last:
            self._last, self._failing_since = reached, None
        failing = next((e for e in map(user_error, errors.values()) if isinstance(e, StorageFailing)), None)
        if failing is not None:
            self._failing_since = self._failing_since or time.monotonic()
            return UserError(str(failing)) if time.monotonic() - self._failing_since > OUTAGE_SECONDS else None
        self._failures += 1
        if self._failures < FAILURES:
            return None
        rank, cause = min(causes.items())
        return UserError(
            f"the run stopped: the workers failed {FAILURES} times in a row without a step forward, the last time at step "
            f"{reached}: worker {rank}: {cause}. `moco-ray resume` goes on from the newest checkpoint; with --debug the whole "
            "story is shown"
        )


def user_error(error: BaseException | None) -> UserError | None:
    """The user's error inside what Ray raises, if there is one."""
    while error is not None:
        if isinstance(error, UserError):
            return type(error)(str(error.args[0]).strip()) if error.args else error
        error = getattr(error, "cause", None) or error.__cause__
    return None


def one_line(error: BaseException) -> str:
    """What happened, without Ray's advice and tracebacks."""
    text = str(user_error(error) or error).partition("\n\nAt:\n")[0]  # behind it are Python's frames, from a callback in C++
    text = (text.strip() or repr(error)).splitlines()
    inner = getattr(error, "health_check_failure", error)  # of Ray Train's poll
    if isinstance(inner, ray.exceptions.RayActorError):
        return DIED
    if isinstance(inner, ray.exceptions.GetTimeoutError) or type(inner).__name__ == "WorkerHealthCheckTimeoutError":
        return "it does not answer"
    last = text[-1].strip()
    return "another worker was lost" if any(word in last for word in OF_A_PEER) else last
