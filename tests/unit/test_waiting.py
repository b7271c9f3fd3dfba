"""The counter that threads wait for, and the gate."""

from __future__ import annotations

import threading

import pytest

from chrion.machine import waiting
from chrion.machine.waiting import Counter, Gate


def test_a_reached_count_needs_no_wait() -> None:
    """A wait for a count that was reached returns at once."""
    counter = Counter()
    counter.advance(3)
    counter.wait(3)
    counter.wait(1)
    assert counter.count == 3


@pytest.mark.parametrize("max_spins", [0, 10**9])
def test_a_waiter_wakes_whether_it_spins_or_parks(max_spins: int) -> None:
    """A waiter without spins parks at once, and one with many spins never parks; both see the change."""
    counter, parked, through = Counter(), threading.Event(), threading.Event()

    def wait() -> None:
        counter.wait(2, max_spins, parked.set)
        through.set()

    thread = threading.Thread(target=wait)
    thread.start()
    counter.advance(1)
    assert parked.wait(60 if max_spins == 0 else 0.15) == (max_spins == 0)
    assert not through.is_set()
    counter.advance(2)
    thread.join(20)
    assert through.is_set()


def test_a_waiter_parks_after_its_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter spins MAX_SPINS times before it parks."""
    spins: list[int] = []
    monkeypatch.setattr(waiting, "spin", spins.append)
    counter, parked = Counter(), threading.Event()
    thread = threading.Thread(target=counter.wait, args=(1, None, parked.set))
    thread.start()
    assert parked.wait(60)
    counter.advance(1)
    thread.join(20)
    assert spins == list(range(waiting.MAX_SPINS))


def test_no_advance_is_missed() -> None:
    """Two threads that advance counters alternately and park every time miss no advance."""
    ping, pong = Counter(), Counter()

    def echo() -> None:
        for count in range(1, 301):
            ping.wait(count, 0)
            pong.advance(count)

    thread = threading.Thread(target=echo)
    thread.start()
    for count in range(1, 301):
        ping.advance(count)
        pong.wait(count, 0)
    thread.join(20)
    assert (ping.count, pong.count) == (300, 300)


def test_a_gate_is_shared_or_exclusive() -> None:
    """Two requests may be inside at once.

    The exclusive thread waits for them, and later requests wait for that thread.
    """
    gate, log = Gate(), []
    inside, leave = threading.Event(), threading.Event()

    def pass_through() -> None:
        gate.enter("first")
        inside.set()
        leave.wait(5)
        log.append("out")
        gate.inside.discard("first")

    def run_alone() -> None:
        with gate.exclusive():
            log.append("alone")

    first, second = threading.Thread(target=pass_through), threading.Thread(target=run_alone)
    first.start()
    assert inside.wait(5)
    gate.enter("second")  # at once
    second.start()
    gate.inside.discard("second")
    leave.set()
    first.join()
    second.join()
    gate.enter("third")
    log.append("in again")
    assert log == ["out", "alone", "in again"]
