"""When a step makes and needs each tensor, from recorded steps. Knows recorded times; nothing of plans or networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from commlayer.observe import RecordedStep
from commlayer.records import Timing


def timing_of(steps: Sequence[RecordedStep], tensors: int, places: Mapping[int, int]) -> Timing:
    """Medians over the steps. `places`: the tensors' order in the forward pass, as far as it was seen.

    A hook sees when gradients become final and when a step ends, not where the forward pass does: what lies before the first
    gradient counts as forward, and tensors are taken to be needed at equal distances over it. Communication is in none of it,
    since training waits for it only between the last gradient and the step's end.
    """
    if not steps:
        raise ValueError("no recorded step to take times from: record at least one")
    first_s = median(min(s.ready.values(), default=s.marks["backward"]) for s in steps)
    backward_s = median(max(0.0, s.marks["backward"] - min(s.ready.values(), default=s.marks["backward"])) for s in steps)
    ready_s = []
    for tensor in range(tensors):
        seen = [s.ready[tensor] - min(s.ready.values()) for s in steps if tensor in s.ready]
        ready_s.append(min(median(seen), backward_s) if seen else backward_s)  # without a gradient, or a buffer
    far = len(places)
    needed_s = [first_s * places.get(tensor, far) / max(1, far) for tensor in range(tensors)]
    return Timing(tuple(ready_s), tuple(needed_s), backward_s, first_s)
