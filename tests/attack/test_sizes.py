"""Sizes claimed by a hostile rank in each exchange that has one: the others get one line that names it, and stay small."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from support.attached import assert_refused, outcome
from support.coordinators import (
    WAIT_S,
)
from support.rank_pool import pool, ranks_first
from support.serving import PLAN
from support.site_groups import met, options, together

from commlayer.balance import Sampler
from commlayer.cluster.calls.messages import ANY
from commlayer.cluster.processes import collectives, relayed_group, site_process_group
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.relayed_group import RelayedGroup
from commlayer.engine.checkpoints import checkpoint, checkpoint_files
from commlayer.engine.epochs.replica import HEAD, TENSOR, GivenState, Replica, decode_state, most_state_nbytes, share_optimizer
from commlayer.engine.epochs.state_relay import NewestEpoch, StateRelay
from commlayer.engine.guards.parameter_drift import DriftRow, ParameterDrift
from commlayer.engine.job.plan_agreement import from_rank_0
from commlayer.engine.observers.trace import gather_steps
from commlayer.observe.step_trace import RecordedStep, TraceEvent
from commlayer.records import Epoch, Member, encode

WORLD, HOSTILE, TIMEOUT_S = 3, 0, 20.0
SIZES = [10**12, 8 << 30, -1]
ALLOWED_GROWTH_NBYTES = 32 << 20
_ready = ranks_first(WORLD)


def model() -> torch.nn.Module:
    return torch.nn.Linear(30, 20)


torch.optim.SGD(model().parameters(), lr=0.1)  # the first optimizer of a process loads 80 MB of modules


def plan(groups: Groups, _: Path) -> None:
    from_rank_0(lambda: b"a plan", groups)


def settings(groups: Groups, _: Path) -> None:
    drift = SimpleNamespace(_settings=lambda: {"lr": "0.1"}, _context=SimpleNamespace(groups=groups))
    ParameterDrift._differing_settings(drift, [DriftRow(0, 1, 0, 0), DriftRow(0, 2, 0, 0)])  # type: ignore[arg-type]


def list_of_checkpoints(groups: Groups, folder: Path) -> None:
    checkpoint.find(groups, groups.rank, WORLD, folder)


def checkpoint_of_model(groups: Groups, folder: Path) -> None:
    mark = checkpoint_files.CheckpointHeader("x", 1, 1, WORLD, 1, "")
    if groups.rank == HOSTILE and not folder.exists():
        checkpoint_files.write(folder, {"training-0": {"x": torch.zeros(1)}}, mark, None)
    found = checkpoint.FoundCheckpoint(folder if groups.rank == HOSTILE else folder / "none", mark, False, {})
    checkpoint.load_training(groups, groups.rank, found, Replica(model()), {})


def optimizer(groups: Groups, _: Path) -> None:
    share_optimizer(torch.optim.SGD(model().parameters(), lr=0.1), groups, HOSTILE)


def trace(groups: Groups, _: Path) -> None:
    job = SimpleNamespace(groups=groups, plan=SimpleNamespace(buckets=[1, 2]), called=lambda place: f"rank {place}",
                          worker=SimpleNamespace(job=SimpleNamespace(tensors=[1, 2])))
    gather_steps(job, [RecordedStep({}, {"backward": 0.0, "end": 1.0}, [])])  # type: ignore[arg-type]


def optimizer_of_head(groups: Groups, _: Path, size: int = 0) -> None:
    if groups.rank == HOSTILE:
        groups.share_bytes(msgspec.msgpack.encode(("", None, size)), 1 << 20, "", source=HOSTILE)
    else:
        optimizer(groups, _)


PLACES: dict[str, tuple[Callable[..., None], int]] = {
    "plan": (plan, 0), "settings": (settings, 1), "list of checkpoints": (list_of_checkpoints, 2),
    "checkpoint of the model": (checkpoint_of_model, 0), "head of the optimizer's state": (optimizer, 0),
    "optimizer's state": (optimizer_of_head, -1), "trace": (trace, 1)}
"""By name: the exchange, and which gathered row is the size. 0: it is broadcast. -1: the hostile rank names it itself."""


def attacked(rank: int, place: str, size: int, folder: str) -> tuple[str, int]:
    """The error line of this rank, and the growth of its memory."""
    act, row = PLACES[place]
    groups = Groups(1, TIMEOUT_S, torch.device("cpu"))
    try:
        if rank != HOSTILE:
            before = memory_nbytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what the process uses
            line = outcome(lambda: act(groups, Path(folder) / "checkpoint"))
            return line, memory_nbytes("VmHWM") - before
        if row < 0:
            return outcome(lambda: act(groups, Path(folder), size)), 0
        with contextlib.ExitStack() as stack:
            rename(stack, groups, size, row)
            return outcome(lambda: act(groups, Path(folder) / "checkpoint")), 0
    finally:
        groups.close()


def rename(stack: contextlib.ExitStack, groups: Groups, size: int, row: int) -> None:
    """This rank claims another size than its own."""
    broadcast, gather_all, rows = dist.broadcast, groups.gather_all, [0]

    def of_source(x: torch.Tensor, *args: Any, **more: Any) -> Any:
        return broadcast(x.fill_(size) if x.dtype == torch.int64 else x, *args, **more)

    def of_all(x: torch.Tensor) -> torch.Tensor:
        rows[0] += 1
        return gather_all(x.fill_(size) if rows[0] == row else x)

    stack.enter_context(mock.patch.object(dist, "broadcast", of_source))
    stack.enter_context(mock.patch.object(groups, "gather_all", of_all))


def memory_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_impossible_size_is_refused_by_all(place: str, size: int, tmp_path: Path) -> None:
    for line, growth_nbytes in pool(WORLD).call(attacked, place, size, str(tmp_path))[HOSTILE + 1 :]:
        assert_refused(line, "E-SIZE", f"rank {HOSTILE}", f"{size} bytes")
        assert growth_nbytes < ALLOWED_GROWTH_NBYTES


BODIES: dict[str, tuple[Callable[..., None], bytes]] = {
    "a trace that expands": (trace, zlib.compress(bytes(64 << 20), 9)), "no trace": (trace, b"noise"),
    "a trace of other steps": (trace, zlib.compress(msgspec.msgpack.encode([]))),
    "a trace of a bucket that does not exist": (trace, zlib.compress(msgspec.msgpack.encode(
        [RecordedStep({}, {"backward": 0.0, "end": 1.0}, [TraceEvent("x", 99, 0.0, 1.0)])]))),
    "settings that are a list": (settings, b"[1, 2]"), "deep settings": (settings, b"[" * 60_000),
}


def bodied(rank: int, name: str) -> tuple[str, int]:
    act, body = BODIES[name]
    groups = Groups(1, TIMEOUT_S, torch.device("cpu"))
    try:
        if rank == HOSTILE:
            return outcome(lambda: collectives.gather_bytes(groups, body, 1 << 40, "")), 0
        before = memory_nbytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        return outcome(lambda: act(groups, Path())), memory_nbytes("VmHWM") - before
    finally:
        groups.close()


@pytest.mark.parametrize("name", BODIES)
def test_malformed_or_growing_body_is_refused_by_all(name: str) -> None:
    for line, growth_nbytes in pool(WORLD).call(bodied, name)[HOSTILE + 1 :]:
        assert_refused(line, "E-FRAME", f"rank {HOSTILE}")
        assert growth_nbytes < ALLOWED_GROWTH_NBYTES


def test_checkpoint_header_with_an_impossible_number_of_workers_is_refused(tmp_path: Path) -> None:
    mark = checkpoint_files.CheckpointHeader("x", 1, 1, 2, 1, "")
    for field in ("world", "servers"):
        one = msgspec.structs.replace(mark, **{field: 10**12})
        checkpoint_files.write(tmp_path / "save-1", {"training-0": {"x": torch.zeros(1)}}, one, None)
        assert "E-CHECKPOINT" in checkpoint_files.find_checkpoints(tmp_path)[0].fault
        encoded = msgspec.json.encode([checkpoint_files.SaveOnDisk(1, mark=one)])
        assert_refused(outcome(lambda data=encoded: collectives.decode_json(data, list[checkpoint_files.SaveOnDisk], "a list",
                                                                            "rank 0")), "E-FRAME", "rank 0", field)
    assert checkpoint_files.own_files(3, 10**12, 10**12) == ["rank-3", "server-3"]


@pytest.mark.parametrize(("highest", "number"), [([0], 1), ([7, 0, 3], 8), ([10**9, 0], 10**9 + 1)])
def test_next_checkpoint_number_is_above_all_existing(highest: list[int], number: int) -> None:
    assert checkpoint.next_number(highest) == number


@pytest.mark.parametrize("highest", [[3, 10**15, 2], [3, -1, 2], [0, 1 << 62, 0]])
def test_checkpoint_number_that_cannot_be_found_again_is_refused(highest: list[int]) -> None:
    assert_refused(outcome(lambda: checkpoint.next_number(highest)), "E-SIZE", "rank 1", str(highest[1]))


def test_number_of_process_groups_of_a_rank_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members.__new__(Members)
    members.ranks = (0, 1)
    monkeypatch.setattr(Members, "exchange_bytes", lambda _, data, *__: [data, (10**12).to_bytes(8, "little")])
    assert_refused(outcome(lambda: members._numbered(1.0, "making a group").__enter__()), "E-SIZE", "rank 1", f"{10**12}")


EPOCH = Epoch(2, (Member(0, 0, "a", 1), Member(1, 1, "b", 2), Member(2, 2, "c", 3)), ())


@pytest.mark.parametrize(("how", "size"), [
    ("take", "longer"), *((how, size) for how in ("take", "give", "common") for size in (*SIZES, "noise"))])
def test_state_for_a_joining_worker_is_bounded_by_its_model(
        how: str, size: int | str, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, (hostile, desk, other) = met(opened, 3)
    monkeypatch.setattr(site_process_group, "kv_client", lambda: desk)
    most_nbytes, soon = most_state_nbytes(model().parameters()), time.monotonic() + WAIT_S
    sizes = (0, size) if how == "common" else (100 if size == "longer" else size, 0)
    givers, joining = ([0, 1], [2]) if how == "give" else ([0, 2], [1])
    named = b"\xc1" if size == "noise" else msgspec.msgpack.encode((*sizes, givers, joining))
    put = [((f"state/{joining[0]}", HOSTILE), named), (("state/1.2.1/0.0", HOSTILE), bytes(1000)),
           (("state/1.2.1/giver0", ANY), msgspec.msgpack.encode(HOSTILE))]
    hostile.request(soon, put=put)
    for rank, home in ((HOSTILE, hostile), (2, other)):
        home.request(soon, put=[(("state/1.2.1/end0", rank), b"")])
    relay = StateRelay(NewestEpoch(lambda: EPOCH, 0.0), EPOCH, 1, WAIT_S, 0.0, most_nbytes)
    before = memory_nbytes("VmRSS")
    line = outcome(lambda: relay.give(b"", b"", givers, joining) if how == "give" else relay.take(lambda *_: None))
    assert_refused(line, "E-FRAME" if size == "noise" else "E-SIZE", "worker 0")
    assert memory_nbytes("VmRSS") - before < ALLOWED_GROWTH_NBYTES


@pytest.mark.parametrize(("givers", "giver"), [([0], HOSTILE), ([2], HOSTILE), ([0, 0], HOSTILE), ([0, 7], HOSTILE), ([0], 7)])
def test_state_for_a_joining_worker_is_taken_from_members_only(
        givers: list[int], giver: int, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, (hostile, desk, _) = met(opened, 3)
    monkeypatch.setattr(site_process_group, "kv_client", lambda: desk)
    named = msgspec.msgpack.encode((100, 0, givers, [2 if (givers, giver) == ([0], HOSTILE) else 1]))
    hostile.request(time.monotonic() + WAIT_S, put=[
        (("state/1", HOSTILE), named), (("state/1.1.1/giver0", ANY), msgspec.msgpack.encode(giver))])
    relay = StateRelay(NewestEpoch(lambda: EPOCH, 0.0), EPOCH, 1, 0.5, 0.0, 1000)
    assert_refused(outcome(lambda: relay.take(lambda *_: None)), "E-FRAME", "worker 0")


def references(count: int) -> bytes:
    """A state for a joining worker whose optimizer names one tensor many times."""
    net = model()
    tensors = {f"parameter.{name}": p.data for name, p in net.named_parameters()} | {"state.0": torch.zeros(1 << 18)}
    state = {"state": {n: {TENSOR: "state.0"} for n in range(count)}, "param_groups": [{"params": [*range(count)]}]}
    head = GivenState(plan=encode(PLAN), optimizer="SGD", state=state)
    return save(tensors | {HEAD: torch.frombuffer(bytearray(msgspec.msgpack.encode(head)), dtype=torch.uint8)})


@pytest.mark.parametrize("data", [references(1000), b"noise", save({"x": torch.zeros(1)})], ids=["many", "noise", "no head"])
def test_state_for_a_joining_worker_needs_no_more_memory_than_its_bytes(data: bytes) -> None:
    net = model()
    replica, before = Replica(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)), memory_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    line = outcome(lambda: replica.install(*decode_state(data, b""), lambda _: None))
    assert_refused(line, "E-JOIN-STATE" if len(data) > 1000 else "E-FRAME")
    assert memory_nbytes("VmHWM") - before < ALLOWED_GROWTH_NBYTES


def test_state_above_the_size_limit_is_an_error_of_the_sender() -> None:
    """The joining worker gets the reason. The other ranks continue to train."""
    net = model()
    replica = Replica(net)
    data, rest = replica.encoded({"buffer.x": torch.zeros(replica.most_nbytes // 4 + 1)}, apart=False)
    assert len(data) + len(rest) < 1000
    line = outcome(lambda: replica.install(*decode_state(data, rest), lambda _: None))
    assert_refused(line, "E-JOIN-STATE", f"at most {replica.most_nbytes}")


@pytest.mark.parametrize("change", [
    {"schedule": [{"step": 0, "shares": {"0": 10**12}}]}, {"schedule": [{"step": 0, "shares": {"0": 9, "1": -1}}]},
    {"schedule": []}, {"epoch": -1}, {"consumed": {"length": 10**12, "left": [[0, 10**12]], "open": {}}}, {"batch": 10**12}],
    ids=str)
def test_sampler_state_of_another_worker_draws_at_most_a_batch(change: dict[str, Any]) -> None:
    sampler = Sampler(50, 8, rank=0, shares=[8])
    state = json.loads(sampler.state_dict()["sampler"])
    sampler.load_state_dict({"sampler": json.dumps(state)})
    assert_refused(outcome(lambda: sampler.load_state_dict({"sampler": json.dumps(state | change)})), "E-SAMPLER-STATE")


INDICES, BUCKETS = [0, 1, 2, 3, 4, 2], [2, 3]
"""Of five parameters, and the number of buckets; their sizes."""


@pytest.mark.parametrize(("indices", "buckets", "refused"), [
    ([4, 3, 2, 1, 0, 2], [1, 4], False), ([0, 1, 2, 3, 4, 2**31 - 1], BUCKETS, True), ([0, 1, 2, 3, 4, 0], BUCKETS, True),
    ([0, 1, 2, 3, 99, 2], BUCKETS, True), ([0, 1, 2, 3, 3, 2], BUCKETS, True), (INDICES, [10**9, 10**9], True),
    (INDICES, [-1, 6], True), (INDICES, [2, 2], True)])
def test_bucket_layout_contains_each_parameter_once(
        indices: list[int], buckets: list[int], refused: bool, opened: list[Any]) -> None:
    def act(group: RelayedGroup, rank: int) -> list[Any]:
        def broadcasts() -> bool:
            for x in (indices, buckets) if rank == HOSTILE else (INDICES, BUCKETS):
                seen.append(torch.tensor(x, dtype=torch.int32))
                group.broadcast([seen[-1]], options(rootRank=HOSTILE)).wait()
            return True

        seen = list[torch.Tensor]()
        if rank == HOSTILE:
            return [outcome(broadcasts), seen]
        return [outcome(lambda: relayed_group.layout.rebuild(broadcasts)), [x.tolist() for x in seen]]

    for line, seen in together(met(opened)[1], act)[1:]:
        if refused:
            assert_refused(line, "E-COLLECTIVE", f"rank {HOSTILE}")
        else:
            assert (line, seen) == ("", [indices, buckets])
