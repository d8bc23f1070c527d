"""A contribution that is far out of what the others send is refused by name; the sum is the others', and nothing is lost."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_kit import quick
from runtime_kit import Rig, on_ranks, step
from summation_kit import Doubles, push, value
from transport_kit import soon

from commlayer import records
from commlayer.compressors import codec_of
from commlayer.control import messages
from commlayer.control.serving import Serving
from commlayer.errors import CommError, RecordError
from commlayer.planner import default_plan
from commlayer.records import Job, Member, ServerInfo, TensorInfo, View
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, key
from commlayer.transport.quarantine import FACTOR, LEAST, OFTEN, Quarantine, Watch
from commlayer.transport.stream_transport import Settings, StreamTransport
from commlayer.transport.summation import Summation

NORMS, ALL = {"finite_only": False}, {"finite_only": True}
Told = list[tuple[int, int, int, str]]


class Weighed(Doubles):
    """Whose norms are the numbers themselves."""

    def norm(self, r: int, payload: memoryview) -> float:
        number = abs(float(np.frombuffer(payload, np.float64)[0]))
        return number if math.isfinite(number) else math.inf


def service(members: int, rounds: int = 1, *, finite_only: bool = False) -> tuple[Summation, Weighed, Told]:
    told: Told = []
    ops = Weighed(rounds)
    quarantine = Quarantine(lambda *what: told.append(what), finite_only=finite_only)
    return Summation(0, 1, {5: ops}, {5: tuple(range(members))}, quarantine), ops, told


def summed(core: Summation, numbers: list[float], number: int, r: int = 0) -> list[Any]:
    """A step in which all weigh 1."""
    replies = []
    for member, one in enumerate(numbers):
        replies += core.push(push(member, one, number, r, weight=1.0), 0.0)
    return replies


def used_to(core: Summation, members: int, steps: int = LEAST) -> None:
    for number in range(steps):
        summed(core, [1.0 + 0.1 * member for member in range(members)], number)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_the_sum_is_the_others(who: int) -> None:
    core, _, told = service(3)
    used_to(core, 3)
    numbers = [1.0, 2.0, 3.0]
    numbers[who] *= 2 * FACTOR
    replies = summed(core, numbers, LEAST)
    rest = sum(one for member, one in enumerate((1.0, 2.0, 3.0)) if member != who)
    assert [(r.peer, value(r), r.header.weight, r.header.flags) for r in replies] == [
        (member, rest, 2.0, Flag.PARTIAL | (Flag.REFUSED if member == who else 0)) for member in range(3)]
    again = core.push(push(who, 0.0, LEAST, weight=1.0), 0.0)
    assert again[0].header.flags & Flag.REFUSED, "told again to who asks again"
    assert [one[:3] for one in told] == [(who, LEAST, 5)]
    assert "the median of the others' last ones 1" in told[0][3]
    again = summed(core, [1.0, 2.0, 3.0], LEAST + 1)
    assert (value(again[0]), again[0].header.weight, again[0].header.flags) == (6.0, 3.0, Flag.NONE)


def test_bits_of_who_is_refused_do_not_count() -> None:
    """What only it has used, nobody has."""
    core, _, _ = service(2)
    used_to(core, 2)
    replies = summed(core, [1.0, 9 * FACTOR], LEAST)
    assert replies[0].header.used == 0b01


def test_norms_are_by_weight_and_rise_with_the_training() -> None:
    core, _, told = service(3)
    for number in range(60):
        size = 1.2**number
        replies = core.push(push(0, size, number, weight=1.0), 0.0) + core.push(push(1, size * 500, number, weight=500.0), 0.0)
        replies += core.push(push(2, size, number, weight=1.0), 0.0)
        assert replies[0].header.weight == 502.0
    assert told == []


def test_what_is_odd_everywhere_is_the_trainings_own() -> None:
    core, ops, told = service(3)
    used_to(core, 3)
    replies = summed(core, [5 * FACTOR, 1.0, 6 * FACTOR], LEAST)
    assert (value(replies[0]), replies[0].header.weight, replies[0].header.flags) == (11 * FACTOR + 1.0, 3.0, Flag.NONE)
    assert told == []
    assert len(ops.added) == 3 * LEAST + 3


def test_nothing_is_refused_for_its_size_before_there_is_a_usual_one() -> None:
    core, _, told = service(2)
    replies = summed(core, [1.0, 1e9], 0)
    assert replies[0].header.weight == 2.0
    assert told == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_only_where_asked(bad: float) -> None:
    core, _, told = service(3)
    assert not math.isfinite(value(summed(core, [1.0, bad, 2.0], 0)[0]))
    assert told == []
    core, _, told = service(3, finite_only=True)
    replies = summed(core, [1.0, bad, 2.0], 0)
    assert (value(replies[0]), replies[0].header.weight) == (3.0, 2.0)
    assert told[0][3] == "it is not finite"
    assert not math.isfinite(value(summed(core, [1.0, bad, bad], 1)[0])), "more than half: the training's own"


def test_who_is_refused_in_one_round_is_in_the_next() -> None:
    core, _, told = service(3, 2)
    for number in range(LEAST):
        summed(core, [1.0, 1.0, 1.0], number)
        summed(core, [1.0, 1.0, 1.0], number, 1)
    summed(core, [1.0, 5 * FACTOR, 1.0], LEAST)
    replies = summed(core, [1.0, 1.0, 1.0], LEAST, 1)
    assert (value(replies[0]), replies[0].header.weight) == (2.0, 2.0)
    assert len(told) == 1, "once for a step"


def test_time_and_again_is_too_often() -> None:
    core, _, told = service(3)
    used_to(core, 3)
    assert core.quarantine is not None
    for number in range(LEAST, LEAST + OFTEN):
        assert not core.quarantine.offences.over()
        summed(core, [1.0, 1.0, 5 * FACTOR], number)
    assert [*core.quarantine.offences.over()] == [2]
    assert not core.quarantine.offences.over()
    assert len(told) == OFTEN


def test_bodies_are_given_back_once() -> None:
    core, _, _ = service(3)
    used_to(core, 3)
    back: list[Message] = []
    for member, one in enumerate((1.0, 9 * FACTOR, 1.0)):
        core.push(push(member, one, LEAST, weight=1.0), 0.0, back.append)
    assert sorted(m.peer for m in back) == [0, 1, 2]


# ---- with codecs


CODECS = ["identity()", "fp16()", "int8(block=32)", "topk(ratio=0.3)", "onebit()", "powersgd(rank=2)", "randomk(ratio=0.3)"]
SHAPE, WORLD, BAD = (24, 33), 3, 1


def gradient(rank: int, number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(SHAPE, generator=made)


def owed_by(buckets: Any) -> torch.Tensor:
    found = torch.zeros(math.prod(SHAPE))
    for bucket in buckets:
        for debt in bucket.debts():
            found[debt.start : debt.stop] += torch.as_tensor(np.asarray(debt.values))
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_applied_and_owed_is_what_the_others_put_in(codec: str) -> None:
    told: Told = []
    quarantine = Quarantine(lambda *what: told.append(what), **NORMS)
    with Rig(WORLD, codec, shapes=[SHAPE], quarantine=quarantine) as rig:
        cells = [cell.ops for server in rig.servers for cell in server._core.cells.values()]

        def owed() -> tuple[list[torch.Tensor], torch.Tensor]:
            return [owed_by(worker.buckets) for worker in rig.workers], owed_by(cells)

        def trained(number: int, times: float) -> list[torch.Tensor]:
            results = on_ranks(WORLD, lambda rank: step(
                rig.workers[rank], [gradient(rank, number) * (times if rank == BAD else 1.0)]))
            for one in results:
                if isinstance(one, BaseException):
                    raise one
            assert all(torch.equal(one[0], results[0][0]) for one in results), "all apply the same"
            return [one[0].view(-1) for one in results]

        for number in range(LEAST):
            trained(number, 1.0)
        assert told == []
        before, server_before = owed()
        applied = trained(LEAST, 3e3)[0]
        after, server_after = owed()
        assert {one[0] for one in told} == {BAD}
        others = [rank for rank in range(WORLD) if rank != BAD]
        buckets = rig.workers[0].buckets
        # Debts are in parts of all members' mean; the others alone make up this one.
        scale = WORLD / len(others) if buckets[0].in_means else 1.0
        put_in = sum(scale * gradient(rank, LEAST).view(-1) + before[rank] - after[rank] for rank in others)
        put_in = put_in + server_before - server_after
        expected = put_in / (WORLD if buckets[0].in_means else len(others))
        if codec != "randomk(ratio=0.3)" or buckets[0].in_means:
            bound = 1e-4 if "fp16" not in codec else 1e-2
            assert float((applied - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))
        assert float(applied.abs().max()) < 100.0, "nothing of what was refused"
        assert float((after[BAD] - before[BAD]).abs().max()) <= 1e-2, "its debts are what they were"
        trained(LEAST + 1, 1.0)
        assert all(worker.units.total == WORLD for worker in rig.workers)
        if codec != "fp16()":  # whose numbers end at 65504: what is larger is not finite
            trained(LEAST + 2, 1e12)
            trained(LEAST + 3, 1.0)
            assert len(told) == 2, "whatever it was, the step after it is as good as any"


def test_a_loss_scalers_job_still_skips() -> None:
    with Rig(WORLD, "int8(block=32)", shapes=[SHAPE], quarantine=Quarantine(lambda *_: None, **NORMS)) as rig:
        results = on_ranks(WORLD, lambda rank: step(
            rig.workers[rank], [gradient(rank, 0) * (math.inf if rank == BAD else 1.0)]))
        assert all(bool(one[0].isnan().all()) for one in results)


def test_a_script_that_says_what_all_weigh_is_not_to_blame() -> None:
    quarantine = Quarantine(lambda *_: None, **NORMS)
    with Rig(WORLD, "identity()", shapes=[SHAPE], quarantine=quarantine) as rig:
        for number in range(LEAST + 2):
            times = 1e6 if number == LEAST else 1.0
            for worker in rig.workers:
                worker.units.weigh(1.0, float(WORLD))
            results = on_ranks(WORLD, lambda rank, number=number, times=times: step(
                rig.workers[rank], [gradient(rank, number) * (times if rank == BAD else 1.0)]))
            assert not [one for one in results if isinstance(one, BaseException)]


def test_a_scaler_and_a_quarantine_of_what_it_lives_by() -> None:
    import commlayer

    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match='quarantine="all" refuses what is not finite'):
        commlayer.attach(model, scaler=scaler, config={"quarantine": "all"})
    commlayer.attach(model, scaler=scaler, config={"quarantine": "norms"}).close()
    with pytest.raises(RecordError, match='quarantine: got .* allowed: "off", "norms" or "all"'):
        quick(quarantine="sometimes")


# ---- as it is served


def test_the_audit_log_and_one_warning_name_the_peer_and_then_it_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job((TensorInfo("weight", (100,)),))
    plan = default_plan(job, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096, cut_nbytes=4096)
    config = quick(quarantine="all", audit=str(tmp_path / "audit"), token="the-jobs-secret")
    serving = Serving("127.0.0.1", 0, config)
    data = records.encode(plan)
    view = View(1, tuple(Member(rank, rank, "host") for rank in range(WORLD)), (ServerInfo(0, serving.address),),
                messages.digest_of(data))
    serving.start(view, data, 0)
    host, port = serving.address.rsplit(":", 1)
    workers = [StreamTransport(Hello(job.digest(), rank, messages.digest_of(data)), settings=Settings(secret="the-jobs-secret"))
               for rank in range(WORLD)]
    for worker in workers:
        worker.dial(SERVER_BASE, (host, int(port)), soon())
    codec = codec_of(plan.buckets[0])
    spec = plan.buckets[0].spec
    with caplog.at_level(logging.WARNING, "commlayer"):
        for number in range(OFTEN):
            answers = []
            for rank, worker in enumerate(workers):
                x, out = torch.ones(100), memoryview(bytearray(codec.bound(spec)))
                body = out[: codec.start(x * (math.nan if rank == BAD else 1.0), codec.init(spec), out)]
                header = Header(Kind.PUSH, 1, number, 0, codec=codec.id, sender=rank, weight=1.0, used=1)
                answers.append(worker.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT))))
                worker.send(SERVER_BASE, header, body)
            for rank in (0, 2, 1):
                try:
                    result = workers[rank].wait(answers[rank], soon())
                except CommError:
                    assert (rank, number) == (BAD, OFTEN - 1), "its connection may end ahead of the last result"
                    continue
                y = torch.empty(100)
                assert codec.decode(result.body, codec.init(spec), y)
                assert (float(y[0]), result.header.weight) == (2.0, 2.0)
        with pytest.raises(CommError):
            workers[BAD].wait(workers[BAD].recv(SERVER_BASE), soon())
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "worker 1: its contribution to step 0, bucket 0 is refused: it is not" in line]) == 1
    assert len([line for line in lines if "is refused" in line]) == 1
    assert len([line for line in lines if "dropped worker 1: its contributions were refused (quarantine)" in line]) == 1
    noted = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    quarantined = [line for line in noted if line["event"] == "quarantined"]
    assert [(line["peer"], line["step"], line["bucket"]) for line in quarantined] == [("worker 1", n, 0) for n in range(OFTEN)]
    for worker in workers:
        worker.close()
    serving.close()


def test_a_watch_forgets() -> None:
    """What is usual is of the last steps."""
    watch = Watch(1, lambda r, payload: float(np.frombuffer(payload, np.float64)[0]), lambda *_: None, **ALL)
    for number in range(200):
        watch.begin(0)
        size = 1.0 if number < 100 else 50.0
        assert not any(watch.holds(push(member, size, number, weight=1.0), 0) for member in range(2))
        assert not watch.settle(0)
    watch.begin(0)
    assert not watch.holds(push(1, 49.0 * FACTOR, 200, weight=1.0), 0)
    assert watch.holds(push(0, 51.0 * FACTOR, 200, weight=1.0), 0)
