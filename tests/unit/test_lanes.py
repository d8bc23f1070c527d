"""What is needed first is coded first and goes out first, also where something larger was ready before it."""

from __future__ import annotations

import threading

from commlayer.engine.lanes import Lane


def test_the_most_urgent_runs_first_and_equals_in_their_order() -> None:
    gate, ran, errors = threading.Event(), list[str](), list[BaseException]()
    lane = Lane("test", errors.append)
    lane.put(lambda: gate.wait(20.0) and None)
    for name, urgency in (("later", (2, 0)), ("bulk", (1, 7)), ("equal", ()), ("first", (1, 0)), ("bulk too", (1, 7)),
                          ("equal too", ())):
        lane.put(lambda name=name: ran.append(name), urgency)  # type: ignore[misc]
    lane.put(lambda: 1 // 0, (3,))  # type: ignore[arg-type, return-value]
    gate.set()
    assert lane.drain(20.0)
    assert ran == ["equal", "equal too", "first", "bulk", "bulk too", "later"]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    lane.put(lambda: ran.append("behind"), (9,))
    lane.close(20.0)
    assert ran[-1] == "behind", "what was put before it ends is run"
