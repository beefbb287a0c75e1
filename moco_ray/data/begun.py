"""Items that begin to be made before somebody asks for them. Not here: what they are (stream.py) and who waits for them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """The items of an iterator, of which a thread makes the first at once; the others are made when they are asked for.

    What making the first one raises, StopIteration too, is raised where it is asked for. Whoever drops this before it was
    asked for anything leaves the thread to end by itself.
    """

    def __init__(self, items: Iterator[T]):
        self._items = items
        self._first: Future | None = Future()
        threading.Thread(target=self._begin, args=(self._first,), name="first-item", daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._first is None:
            return next(self._items)
        first, self._first = self._first, None
        made, item = first.result()
        if made:
            return item
        raise item

    def _begin(self, first: Future) -> None:
        try:
            first.set_result((True, next(self._items)))
        except BaseException as error:  # noqa: BLE001  handed to whoever asks; a Future holds no StopIteration
            first.set_result((False, error))
