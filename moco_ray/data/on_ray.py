"""An ordered map over Ray tasks, for work whose results are small. Needs a running Ray.

Responsible for how many tasks are in flight and for the one line that a user's mistake in a task becomes. Not
responsible for streams of images (stream.py).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import ray
from ray.exceptions import RayError

from moco_ray.errors import UserError

TASKS_IN_FLIGHT = 256  # more than most clusters have CPUs; each is a few kilobytes for the driver

T, R = TypeVar("T"), TypeVar("R")


def pipeline_name() -> str:
    """Of the Ray Data pipelines of this driver and all its workers: what they ask of an autoscaler goes by it (cluster.forget_pipelines)."""
    return f"moco-ray-{ray.get_runtime_context().get_job_id()}"


def spread(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """work(item) of each item in order, as tasks of one CPU. Raises the UserError that a task raised."""
    task, shared = ray.remote(num_cpus=1, max_retries=3)(_call).remote, ray.put(work)
    flying: deque[ray.ObjectRef] = deque()
    try:
        for item in items:
            flying.append(task(shared, item))
            if len(flying) >= TASKS_IN_FLIGHT:
                yield ray.get(flying.popleft())
        while flying:
            yield ray.get(flying.popleft())
    except RayError as error:
        raise (user_error(error) or error) from None
    finally:
        for reference in flying:
            ray.cancel(reference)


def _call(work: Callable[[T], R], item: T) -> R:
    return work(item)


def user_error(error: BaseException | None) -> UserError | None:
    """The UserError that lies behind an error of a task, in one line.

    Ray raises an error that is of the cause's class too, but whose text is the task's traceback: look behind it. And
    it appends advice on retries to the text of the cause: ours has one line, so the first is all of it.
    """
    while error is not None and (isinstance(error, RayError) or not isinstance(error, UserError)):
        error = getattr(error, "cause", None) or error.__cause__
    return None if error is None else type(error)(str(error).splitlines()[0])
