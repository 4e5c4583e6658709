"""Ahead: the next item is made in a thread of its own while the last one is used; one is ahead, never more."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items in order, each made while the one before it is used.

    An error of theirs is raised here when its item is due. Whoever stops early waits for the item being made.
    """
    end: object = object()
    with ThreadPoolExecutor(1, "lenspipe-ahead") as thread:
        made = thread.submit(next, items, end)
        while (item := made.result()) is not end:
            made = thread.submit(next, items, end)
            yield item  # type: ignore[misc]  # not the end
