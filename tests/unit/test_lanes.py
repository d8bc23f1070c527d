"""What is needed first is coded first and goes out first, also where something larger was ready before it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from support.workers import Rig, on_ranks

from commlayer.engine.lanes import Lane
from commlayer.transport.protocol import Kind

WORLD = 2


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


def test_frames_leave_in_forward_order_whatever_was_ready_first() -> None:
    """All of a step is ready before anything is coded: the first layer's bucket, ready last, goes out first."""
    with Rig(WORLD, "int8()", shapes=[(500,), (900,), (900,), (900,)]) as rig:
        count = len(rig.plan.buckets)
        pushed: list[list[int]] = [[] for _ in range(WORLD)]
        gates = [threading.Event() for _ in range(WORLD)]

        def body(rank: int) -> list[int]:
            worker = rig.workers[rank]
            transport: Any = rig.transports[rank]
            send = transport.send

            def noted(peer: int, header: Any, data: Any = b"") -> Any:
                if header.kind == Kind.PUSH:
                    pushed[rank].append(header.bucket)
                return send(peer, header, data)

            transport.send = noted
            exchange: Any = next(iter(worker._paths.of.values()))._exchange  # type: ignore[attr-defined]
            exchange._encode.put(lambda: gates[rank].wait(20.0) and None)
            for tensor in reversed(range(4)):
                worker.ready(tensor, torch.ones(worker.job.tensors[tensor].shape))
            worker.complete([None] * 4)
            gates[rank].set()
            worker.wait_all(20.0)
            worker.commit([torch.empty(info.shape) for info in worker.job.tensors])
            return pushed[rank]

        result = on_ranks(WORLD, body)
    assert result == [[*reversed(range(count))]] * WORLD
    assert count == 4
