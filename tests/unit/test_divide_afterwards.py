"""The law, if contributions are divided by a total weight that turns out to be wrong: weights change in every step, and members
die in the middle of an exchange.

The exchange is that of the summation service, reduced to one bucket: members encode w g / A + e, the server closes with the
contributions that have arrived, and members correct their residuals. The total A is that of the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import codecs as kit

from commlayer.cluster.servers import bucket_sum
from commlayer.cluster.servers.bucket_sum import as_float32, divided_afterwards
from commlayer.compressors import parse, two_way, wrap
from commlayer.compressors.codec import Codec
from commlayer.compressors.feedback import find_residual
from commlayer.compressors.state import seed
from commlayer.records import Spec

MEMBERS, NUMEL, STEPS = 5, 640, 60
CODECS = [
    "int4(64)", "int8(64)", "onebit(64)", "error_feedback(qsgd())", "topk(0.01)", "topk(0.1)", "topk(0.1, exact=True)",
    "block_threshold(0.1)", "randomk(0.3)", "error_feedback(fp16())", "powersgd(2)", "momentum(int4(64), 0.5)",
    "momentum(topk(0.2), 0.5)", "momentum(randomk(0.3), 0.5)",
]
SERVER_ONLY = two_way(parse("identity()"), wrap(parse("int4(64)")))
"""Only the server keeps a residual."""
Weights = Callable[[int], Sequence[float]]


def jittered(step: int) -> list[float]:
    return list(1.0 + np.random.default_rng(step).uniform(-0.2, 0.2, MEMBERS))


def threefold(step: int) -> list[float]:
    return list(np.random.default_rng(step).choice([1.0, 3.0], MEMBERS))


WEIGHTS: dict[str, Weights] = {
    "equal": lambda step: [1.0] * MEMBERS,
    "within 20 %": jittered,
    "1 or 3 at random": threefold,
    "totals of 1 and 10 in turns": lambda step: [10.0 if step % 2 else 1.0] * MEMBERS,
    "a short batch now and then": lambda step: [0.05 if step % 10 == 9 else 1.0] * MEMBERS,
    "unequal, one without samples": lambda step: [0.0 if step % 3 else 2.0, 1.0, 4.0, 1.0, 0.5],
}
DEATHS = {20: 4, 40: 1}
"""Step and member: it dies after it has encoded its contribution, and before the contribution arrives."""


class Job:
    """Members and a server of one bucket, with an account of what was put in and applied."""

    def __init__(self, codec: Codec) -> None:
        self.codec: Any = codec
        self.spec = Spec((32, NUMEL // 32))
        self.states = [self._seeded(codec.init(self.spec), rank) for rank in range(MEMBERS)]
        self.server = self._seeded(codec.init_server(self.spec), -1)
        self.bound = codec.bound(self.spec)
        self.accs = [codec.new_accumulator(self.spec, r) for r in range(len(codec.rounds))]
        self.alive = list(range(MEMBERS))
        self.assumed = float(MEMBERS)
        self.put, self.applied, self.lost = (np.zeros(NUMEL) for _ in range(3))
        self.peak = 0.0

    def _seeded(self, state: Any, sender: int) -> Any:
        seed(state, "job", 0, sender)
        return state

    def step(self, number: int, weights: Sequence[float], dies: int | None = None, discard: bool = False) -> None:
        codec, chance = self.codec, np.random.default_rng(1000 + number)
        gradients = 0.3 + chance.standard_normal((MEMBERS, NUMEL)).astype(np.float32)
        corrected = codec.has_residual
        assumed = as_float32(self.assumed) if corrected else float(MEMBERS)
        inputs = {m: (gradients[m] * np.float32(weights[m] / assumed)).astype(np.float32) for m in self.alive}
        velocities = {m: state["velocity"].astype(float) * codec.beta for m, state in enumerate(self.states)
                      if m in self.alive and "velocity" in state}
        outs = {m: memoryview(bytearray(self.bound)) for m in self.alive}
        if dies is not None:
            codec.start(inputs[dies], self.states[dies], outs[dies])
            self.alive.remove(dies)
            self.lost += self._owed(dies, inputs[dies])
        weight = as_float32(sum(weights[m] for m in self.alive))
        division = divided_afterwards(assumed, weight, corrected=corrected)
        payloads = {m: outs[m][: codec.start(inputs[m], self.states[m], outs[m])] for m in self.alive}
        for r, acc in enumerate(self.accs):
            for place, payload in enumerate(payloads.values()):
                codec.add(r, payload, acc, first=place == 0)
            last = r + 1 == len(self.accs)
            if last:
                acc["sum"] *= np.float32(division.share)
            result = memoryview(bytearray(self.bound))
            result = result[: codec.emit(r, acc, self.server, result)]
            if not last:
                payloads = {m: outs[m][: codec.next(r, result, self.states[m], outs[m])] for m in self.alive}
        self._finish(result, inputs, velocities, weights, weight, division, discard=discard)

    def _owed(self, member: int, x: Any) -> Any:
        """What is lost with a member that dies: its residual from before the step."""
        self.codec.undo(self.states[member], x)
        residual = find_residual(self.states[member])
        return 0.0 if residual is None else residual.astype(float)

    def _finish(self, result: Any, inputs: Any, velocities: Any, weights: Any, weight: float, division: Any, *,
                discard: bool) -> None:
        codec, y = self.codec, np.empty(NUMEL, np.float32)
        for m in self.alive:
            assert codec.decode(result, self.states[m], y)
            if codec.has_residual and division.ratio != 1.0:
                codec.reweigh(self.states[m], division.share, inputs[m] * np.float32(division.ratio - 1.0))
        if discard:
            for m in self.alive:
                codec.undo(self.states[m], inputs[m])
            codec.undo_server(self.server)
        else:
            self.applied += y
            for m in self.alive:
                self.put += inputs[m].astype(float) * division.ratio + velocities.get(m, 0.0)
        self.assumed = weight or self.assumed
        owed = [residual for state in (*(self.states[m] for m in self.alive), self.server)
                if (residual := find_residual(state)) is not None]
        self.peak = max(self.peak, *(float(np.abs(each).max()) for each in owed))

    def error(self) -> float:
        """The largest difference between what was put in and what was applied or is still owed."""
        owed = [find_residual(self.states[m]) for m in self.alive] + [find_residual(self.server)]
        rest = sum(each.astype(float) for each in owed if each is not None)
        return float(np.abs(self.put - self.applied - rest - self.lost).max())


def run(codec: Codec, weights: Weights, *, deaths: bool = True, discards: bool = False) -> Job:
    job = Job(codec)
    for number in range(STEPS):
        job.step(number, weights(number), DEATHS.get(number) if deaths else None, discard=discards and number % 4 == 2)
    return job


@pytest.mark.commit(60)
@pytest.mark.commit(15)
@pytest.mark.parametrize("backend", kit.AVAILABLE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("codec", [*CODECS, SERVER_ONLY], ids=str)
def test_applied_plus_residuals_equal_input(codec: str | Codec, weights: str, backend: str) -> None:
    with kit.use(backend):
        job = run(wrap(parse(codec)) if isinstance(codec, str) else codec, WEIGHTS[weights], discards=True)
    assert job.error() < 2e-4 * np.abs(job.put).max()


@pytest.mark.parametrize("codec", ["int4(64)", "onebit(64)", "topk(0.1)"])
def test_residuals_stay_bounded_when_totals_alternate(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = run(wrap(parse(codec)), WEIGHTS["equal"], deaths=False).peak
    assert run(wrap(parse(codec)), WEIGHTS["totals of 1 and 10 in turns"], deaths=False).peak < 10 * calm
    monkeypatch.setattr(bucket_sum, "MOST_SHARE", 1e9)
    with np.errstate(all="ignore"):
        assert not run(wrap(parse(codec)), WEIGHTS["totals of 1 and 10 in turns"], deaths=False).peak < 1e6 * calm
