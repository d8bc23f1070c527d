"""The contract holds a codec of two SUM rounds: a rank-one power step, defined here, through worker and server sides."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, payload, snapshot
from commlayer.compressors.codec import Round, State, accumulator
from commlayer.compressors.payload import Buffer
from commlayer.records import Spec

ID = 240
HEADER = payload.HEADER_NBYTES


class RankOne(msgspec.Struct, frozen=True):
    """M is sent as p q': round 0 sums M q over the workers, round 1 sums M' p for the normalised sum p. q is kept."""

    id: ClassVar[int] = ID
    rounds: ClassVar[tuple[Round, ...]] = (Round.SUM, Round.SUM)
    biased: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def bound(self, spec: Spec) -> int:
        return HEADER + 4 * max(spec.shape)

    def init(self, spec: Spec) -> State:
        rows, columns = spec.shape
        return {"q": torch.linspace(1, 2, columns), "p": torch.zeros(rows), "_sent_q": None, "_x": None}

    def init_server(self, spec: Spec) -> State:
        return {}

    def start(self, x: torch.Tensor, state: State, out: memoryview) -> int:
        state["_x"] = x.view(state["p"].numel(), state["q"].numel())
        return put(out, state["_x"] @ state["q"])

    def next(self, r: int, result: Buffer, state: State, out: memoryview) -> int:
        p = take(result, state["p"].numel())
        if p is None:
            state["_sent_q"] = None
            return payload.write_flagged(out, ID, state["q"].numel())
        state["p"].copy_(p / (p.norm() + 1e-20))
        state["_sent_q"] = state["_x"].T @ state["p"]
        return put(out, state["_sent_q"])

    def sent(self, state: State, out: torch.Tensor) -> None:
        if state["_sent_q"] is None:
            out.zero_()
        else:
            out.copy_(torch.outer(state["p"], state["_sent_q"]).view(-1))

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        q = take(result, state["q"].numel())
        if q is None:
            out.fill_(float("nan"))
            return False
        out.copy_(torch.outer(state["p"], q).view(-1))
        state["q"].copy_(q / (q.norm() + 1e-20))
        return True

    def undo(self, state: State, x: torch.Tensor, cut: Any = None) -> None: ...

    def undo_server(self, state: State, cut: Any = None) -> None: ...

    def zeros(self, spec: Spec, r: int) -> Any:
        return accumulator(torch.zeros(spec.shape[r]))

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        part = take(payload_, acc["sum"].numel())
        if first:
            acc["sum"].zero_()
            acc["flagged"][0] = False
        if part is None:
            acc["flagged"][0] = True
        else:
            acc["sum"] += part

    def emit(self, r: int, acc: Any, state: State, out: memoryview) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, ID, acc["sum"].numel())
        return put(out, acc["sum"])


def put(out: memoryview, values: torch.Tensor) -> int:
    n = values.numel()
    if not bool(torch.isfinite(values).all()):
        return payload.write_flagged(out, ID, n)
    payload.write(out, ID, n, n)
    out[HEADER : HEADER + 4 * n] = values.contiguous().numpy().tobytes()
    return HEADER + 4 * n


def take(message: Buffer, n: int) -> torch.Tensor | None:
    head = payload.read(message, ID, n)
    if head.flagged:
        return None
    payload.expect("bytes of body", head.body.nbytes, 4 * n)
    return torch.frombuffer(bytearray(head.body), dtype=torch.float32)


SPEC = Spec((40, 30))


def test_two_rounds_project_the_sum() -> None:
    assert isinstance(RankOne(), Codec)
    cluster = kit.Cluster(RankOne(), SPEC, 3)
    xs = [kit.noise(1200, i) for i in range(3)]
    sums = cluster.step(xs)
    whole = torch.stack(xs).sum(0).view(40, 30)
    p = whole @ torch.linspace(1, 2, 30)
    p /= p.norm()
    torch.testing.assert_close(sums[0].view(40, 30), torch.outer(p, whole.T @ p), rtol=1e-4, atol=1e-4)
    assert torch.equal(sums[0], sums[2])


def test_error_feedback_conserves_over_two_rounds() -> None:
    cluster = kit.Cluster(error_feedback(RankOne()), SPEC, 3)
    assert "residual" not in cluster.server, "a SUM comes back as it is: the server keeps nothing"
    put_in, got = torch.zeros(1200, dtype=torch.float64), torch.zeros(1200, dtype=torch.float64)
    for step in range(8):
        xs = [kit.noise(1200, 10 * step + i) for i in range(3)]
        sums = cluster.step(xs)
        if step % 3 == 1:
            cluster.undo()
            cluster.undo()
        else:
            put_in += torch.stack(xs).double().sum(0)
            got += sums[1].double()
    torch.testing.assert_close(got + cluster.kept(), put_in, rtol=1e-4, atol=1e-4)
    assert {"residual", "inner.q", "inner.p"} == set(snapshot(cluster.states[0]))


@pytest.mark.parametrize("sender", [0, 2])
def test_non_finite_input_reaches_everyone_through_both_rounds(sender: int) -> None:
    cluster = kit.Cluster(error_feedback(RankOne()), SPEC, 3)
    xs = [kit.noise(1200, i) for i in range(3)]
    cluster.step(xs)
    before = [state["residual"].clone() for state in cluster.states]
    xs[sender][17] = float("nan")
    sums = cluster.step(xs)
    assert cluster.finite == [False] * 3
    assert bool(torch.isnan(sums[0]).all())
    cluster.undo()
    for old, state in zip(before, cluster.states, strict=True):
        torch.testing.assert_close(state["residual"], old, rtol=1e-6, atol=1e-6)


def test_undo_between_the_rounds() -> None:
    """Also after a step that was applied: what that sent must not come back."""
    codec = error_feedback(RankOne())
    cluster = kit.Cluster(codec, SPEC, 1)
    cluster.step([kit.noise(1200, 1)])
    state = cluster.states[0]
    old, x = state["residual"].clone(), kit.noise(1200)
    codec.start(x, state, kit.room(codec, SPEC))
    codec.undo(state, x)
    torch.testing.assert_close(state["residual"], old, rtol=1e-6, atol=1e-6)
