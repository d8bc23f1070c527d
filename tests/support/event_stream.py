"""The events of a job, as its coordinator has them."""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.observe.events import (
    Event,
    JobEvent,
    LinkEvent,
    LogEvent,
    MemberEvent,
    NoiseScaleEvent,
    PlanEvent,
    QualityEvent,
    StepEvent,
    WaitEvent,
)

START = 1_700_000_000.0


def stream(world: int = 3, seconds: int = 30, *, trouble: bool = True, start: float = START) -> Iterator[Event]:
    """A job of `world` homes: one becomes silent, returns, and one dies."""
    yield JobEvent(time=start, run="5f0c2a91d3e4b687", name="train.py", world=world, version="0.1.0")
    for number in range(world):
        yield MemberEvent(time=start, member=f"worker {number}", name=f"home-{number}")
    yield PlanEvent(time=start + 1, rank=0, digest="1a2b3c4d5e6f7081", codec="int4()", local_steps=8, step_s=0.21,
                    convergence_factor=1.08, summary="12 buckets, mostly int4(), H=8, 210.0 ms a step predicted")
    for second in range(2, seconds):
        at = start + second
        for number in range(world):
            if trouble and number == world - 1 and 10 <= second < 20:
                continue
            exposed_s = 0.02 + 0.01 * number % 0.1
            yield StepEvent(time=at, rank=number, step=5 * second, steps=5, step_s=0.2 + exposed_s, compute_s=0.2,
                            exposed_s=exposed_s, hidden_s=0.1, sent_bytes=1_000_000, received_bytes=1_000_000,
                            dense_bytes=27_000_000, loss=4.0 / second, share=1 / world, samples=160.0)
            if second % 5 == 0:
                yield LinkEvent(time=at, rank=number, up_bytes_per_s=1.2e6, down_bytes_per_s=1.1e7,
                                planned_up_bytes_per_s=1.25e6, planned_down_bytes_per_s=1.25e7, rtt_s=0.03)
        if trouble and 13 <= second < 20:
            yield WaitEvent(time=at, what="heartbeat", names=(f"worker {world - 1}",), waited_s=second - 9.0, limit_s=60.0)
        if trouble and second == 20:
            yield WaitEvent(time=at, what="heartbeat", names=(f"worker {world - 1}",), over=True)
    yield QualityEvent(time=start + seconds, rank=0, cosine=0.93, residual=1.5)
    yield NoiseScaleEvent(time=start + seconds, rank=0, batches=12.0)
    if trouble:
        yield LogEvent(time=start + seconds, rank=0, level="warning", code="E-PEER-LOST", text="worker 1: connection lost")
        yield MemberEvent(time=start + seconds, member="worker 1", name="home-1", state="dead",
                          reason="no heartbeat for 60.0 s", continues=True)
