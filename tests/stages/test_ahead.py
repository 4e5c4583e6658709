"""Ahead: order, one item ahead and never more, errors in their place, and no thread left behind."""

import threading
import time

import pytest

from lenspipe.stages.ahead import ahead


def test_items_come_in_order():
    assert list(ahead(iter(range(50)))) == list(range(50))
    assert list(ahead(iter(()))) == []


def test_one_item_is_made_ahead_and_no_more():
    made = []

    def items():
        for i in range(6):
            made.append(i)
            yield i

    for used in ahead(items()):
        time.sleep(0.02)  # a slow user
        assert len(made) <= used + 2
    assert made == list(range(6))


def test_the_next_item_is_made_while_one_is_used():
    met = threading.Barrier(2)

    def items():
        yield 0
        met.wait(timeout=30)  # passes only if the user is at the first item meanwhile
        yield 1

    first, *rest = (item if item else (met.wait(timeout=30), item)[1] for item in ahead(items()))
    assert [first, *rest] == [0, 1]


def test_an_error_comes_when_its_item_is_due():
    def items():
        yield 0
        raise ValueError("the second")

    found = ahead(items())
    assert next(found) == 0
    with pytest.raises(ValueError, match="the second"):
        next(found)


def test_whoever_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    found = ahead(iter(range(10)))
    assert next(found) == 0
    found.close()
    assert threading.active_count() == before
