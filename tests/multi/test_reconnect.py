"""Connections that break inside a step, in every sync mode: the step continues with the same bits, and nothing is added twice.
"""

from __future__ import annotations

import functools
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import assert_refused, data, mlp, outcome, plan_of, sync_of
from support.coordinators import until
from support.internals import broken_peers
from support.jobs import distributed_job
from support.keys import (
    Folders,
)
from support.mailbox import InboxTransport
from support.meshes import FAR, GrpcEnd, soon
from support.rank_pool import Servers, pool
from support.workers import Rig, job, on_ranks, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.cluster.calls import messages
from commlayer.config import host_port, join_host
from commlayer.engine.epochs.plan_switch import switch
from commlayer.errors import CorruptFrame, PeerLost, Refused
from commlayer.planner import default_plan
from commlayer.transport import handshake
from commlayer.transport.endpoint import Address, Settings
from commlayer.transport.flow import credit
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, Message
from commlayer.transport.reconnect import ASK_NBYTES, ReconnectingTransport
from tests.chaos import proxy

UP, DOWN = 0, 1


class Cut(NamedTuple):
    """After that many bytes in one direction, the connection that carries the next one ends, or that byte is changed."""

    way: int
    after: int
    how: str = "reset"
    """reset, close or flip."""


class Cutter:
    """A proxy before one address. `shots` counts the cuts, `passed` the bytes in each direction."""

    def __init__(self, target: Address, cuts: list[Cut], host: str = "127.0.0.1") -> None:
        self._target = target
        self._cuts = [sorted((c for c in cuts if c.way == way), key=lambda c: c.after) for way in (UP, DOWN)]
        self._lock = threading.Lock()
        self.passed, self.shots, self.connections = [0, 0], 0, 0
        self._open: set[socket.socket] = set()
        self._near: set[socket.socket] = set()
        self._quiet: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.address: Address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for near, far in proxy.accepted(self._listener, self._target):
            with self._lock:
                self._open |= {near, far}
                self._near.add(near)
                self.connections += 1
            for way, source, sink in ((UP, near, far), (DOWN, far, near)):
                threading.Thread(target=self._pump, args=(way, source, sink), daemon=True).start()

    def _pump(self, way: int, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    cut = self._cuts[way][0] if self._cuts[way] else None
                    room = len(data) if cut is None else max(0, min(len(data), cut.after - self.passed[way]))
                    self.passed[way] += room
                    fired = cut is not None and room < len(data)
                    if fired:
                        self._cuts[way].pop(0)
                        self.shots += 1
                    if flip := fired and cut is not None and cut.how == "flip":
                        self.passed[way] += len(data) - room
                if flip:
                    sink.sendall(data[:room] + bytes([data[room] ^ 0x10]) + data[room + 1 :])
                    continue
                sink.sendall(data[:room])
                if fired:
                    assert cut is not None
                    proxy.end(source, reset=cut.how == "reset")
                    proxy.end(sink, reset=cut.how == "reset")
                    return
            if source not in self._quiet:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            if source not in self._quiet and sink not in self._quiet:
                proxy.end(source, reset=True)
                proxy.end(sink, reset=True)

    def cut_next(self, cut: Cut) -> None:
        """Adds a cut after that many more bytes."""
        with self._lock:
            self._cuts[cut.way].append(cut._replace(after=self.passed[cut.way] + cut.after))

    def break_near(self) -> None:
        """Breaks the dialling ends only."""
        with self._lock:
            near, self._near = self._near, set()
        for one in near:
            self._quiet.add(one)
            proxy.end(one, reset=True)

    def break_all(self) -> None:
        """Every connection, now."""
        with self._lock:
            ends, self._open = self._open, set()
        for one in ends:
            proxy.end(one, reset=True)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else the thread in accept() takes one more
        self._listener.close()
        self.break_all()


class Breakable:
    """Like transport.loopback.Hub, over TCP, with a cutter between each worker and each server.

    `cuts[worker]` are those of its connections to the first server.
    """

    def __init__(self, cuts: dict[int, list[Cut]] | None = None, *, host: str = "127.0.0.1", window_s: float = 20.0,
                 keys: dict[int, Keys] | None = None) -> None:
        self._cuts, self._host, self._window_s, self._keys = cuts or {}, host, window_s, keys or {}
        self._targets: dict[int, Address] = {}
        self.cutters: dict[tuple[int, int], Cutter] = {}
        self.servers: dict[int, InboxTransport] = {}
        self.workers: dict[int, ReconnectingTransport] = {}

    def transport(self, rank: int) -> Any:
        settings = Settings(resume=True, keys=self._keys.get(rank), refused=lambda *_: None)
        if rank >= SERVER_BASE:
            stream_transport = self.servers[rank] = InboxTransport(Hello("job", rank), settings=settings)
            self._targets[rank] = stream_transport.listen()
            return stream_transport
        carrier = InboxTransport(Hello("job", rank, session=bytes([rank]) * 16), settings=settings)
        resumed = self.workers[rank] = ReconnectingTransport(carrier, self._window_s)
        for server, target in self._targets.items():
            cutter = self.cutters[rank, server] = Cutter(
                target, self._cuts.get(rank, []) if server == SERVER_BASE else [], self._host)
            resumed.connect(server, functools.partial(carrier.dial, server, cutter.address), soon())
        return resumed

    @property
    def shots(self) -> int:
        return sum(cutter.shots for cutter in self.cutters.values())

    def close(self) -> None:
        for cutter in self.cutters.values():
            cutter.close()


def random_cuts(
    chance: random.Random, up_nbytes: int, down_nbytes: int, kinds: tuple[str, ...] = ("reset", "close", "flip"),
) -> list[Cut]:
    """One to four, anywhere in the bytes of a whole run."""
    results = []
    for _ in range(chance.randint(1, 4)):
        way = chance.choice((UP, DOWN))
        results.append(Cut(way, chance.randrange((up_nbytes, down_nbytes)[way]), chance.choice(kinds)))
    return results


class Counted:
    """Ops that count additions by round, which reveals duplicates and losses."""

    def __init__(self, inner: Any, added: Counter[tuple[int, int]], bucket: int) -> None:
        self._inner, self._added, self._bucket = inner, added, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None:
        self._added[self._bucket, r] += 1
        self._inner.add(r, payload, acc, first)


WORLD, STEPS = 3, 4
CODECS = ["identity()", "int8()", "topk(ratio=0.1)", "powersgd(rank=2)", "randomk(ratio=0.1)",
          "momentum(topk(ratio=0.1))"]


def gradients(rank: int, number: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Outcome:
    """What the ranks received, and what the servers added."""

    def __init__(self, hub: Any, codec: str, *, weighed: bool = False, **rig: Any) -> None:
        """`weighed`: ranks weigh something else in every step, and do not announce it."""
        self.added: Counter[tuple[int, int]] = Counter()
        with Rig(WORLD, codec, hub=hub, **rig) as job:
            cells = [cell for server in job.servers for cell in server.core.cells.values()]
            for cell in cells:
                cell.ops = Counted(cell.ops, self.added, cell.bucket)
            shapes = [info.shape for info in job.job.tensors]

            def train(rank: int) -> list[torch.Tensor]:
                worker, report = job.workers[rank], []
                for n in range(STEPS):
                    if weighed:
                        worker.units.weight = 1.0 + (3 * rank + 2 * n) % 5
                    report += [t for t in step(worker, gradients(rank, n, shapes)) if t is not None]
                worker.drain()  # the last stale results were not awaited
                return report

            self.results = on_ranks(WORLD, train, 60.0)
            self.repeats = sum(getattr(t, "repeats", 0) for t in job.transports)
        for result in self.results:
            if isinstance(result, BaseException):
                raise result

    def same(self, other: Outcome) -> bool:
        pairs = [pair for a, b in zip(self.results, other.results, strict=True) for pair in zip(a, b, strict=True)]
        return all(torch.equal(a, b) for a, b in pairs) and self.added == other.added


def same_when_cut(codec: str, seeds: int, options: dict[str, Any] | None = None, **rig: Any) -> Counter[tuple[int, int]]:
    """Runs it without cuts and with them; returns the additions of both. `options`: of the hub."""
    uncut = Breakable(**options or {})
    expected = Outcome(uncut, codec, **rig)
    assert expected.added
    passed = [max(c.passed[way] for (_, server), c in uncut.cutters.items() if server == SERVER_BASE) for way in (0, 1)]
    uncut.close()
    fired = 0
    for seed in range(seeds):
        chance = random.Random(f"{codec} {seed}")
        hub = Breakable({rank: random_cuts(chance, *passed) for rank in range(WORLD)}, **options or {})
        assert Outcome(hub, codec, **rig).same(expected), seed
        fired += hub.shots
        hub.close()
    assert fired >= seeds
    return expected.added


@pytest.mark.commit(2)
@pytest.mark.parametrize("codec", CODECS)
def test_cuts_at_any_byte_change_no_bit(codec: str) -> None:
    assert set(same_when_cut(codec, 3).values()) == {WORLD * STEPS}


def test_changed_weights_are_not_sent_twice() -> None:
    """All weights differ from the assumed ones in every step."""
    assert set(same_when_cut("topk(ratio=0.1)", 3, weighed=True).values()) == {WORLD * STEPS}


@pytest.mark.commit(1)
@pytest.mark.parametrize("which", ["some", "all"])
def test_stale_results_are_equal_after_cuts(which: str) -> None:
    layout = default_plan(job(), codec="topk(ratio=0.1)", path="service", servers=2, ranks_per_node=1, fuse_nbytes=2048,
                          cut_nbytes=4096)
    late = tuple(msgspec.structs.replace(b, stale=which == "all" or b.id % 3 == 1) for b in layout.buckets)
    same_when_cut("", 2, plan=msgspec.structs.replace(layout, buckets=late))


def test_chunked_bodies_restart_after_a_cut() -> None:
    same_when_cut("identity()", 2, {"host": FAR}, shapes=[(300, 400), (50,)])


def test_every_tls_reconnect_is_authenticated_again(folders: Folders) -> None:
    nodes = {0: folders.worker, 1: folders.second, 2: folders.dials, SERVER_BASE: folders.server}
    same_when_cut("topk(ratio=0.1)", 2, {"keys": {peer: Keys(str(node)) for peer, node in nodes.items()}})


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["reset", "close", "flip"])
@pytest.mark.parametrize("way", [UP, DOWN])
def test_cut_inside_a_handshake_is_recovered(folders: Folders, way: int, how: str) -> None:
    """Of TLS and of the greeting after it, at places all over both."""
    server, worker, cutter = pair(30.0, keys=(Keys(str(folders.server)), Keys(str(folders.worker))))
    ends = [*range(0, 8), *range(8, 2600, 250)]
    for number, after in enumerate(ends):
        cutter.cut_next(Cut(way, after, how))
        cutter.break_all()
        answer = worker.request(SERVER_BASE, PUSH._replace(step=number), b"payload")
        assert server.wait(server.recv(0), soon()).header.step == number
        server.send(0, PUSH._replace(kind=Kind.RESULT, step=number), b"sum")
        assert bytes(answer.wait(soon()).body) == b"sum"
    assert cutter.shots >= len(ends) - 2
    for end in (worker, server, cutter):
        end.close()


def pair(window_s: float, keys: tuple[Keys | None, Keys | None] = (None, None), begun: Callable[[InboxTransport], object] = id,
         kind: type[InboxTransport] = InboxTransport, host: str = "127.0.0.1",
         **waits: Any) -> tuple[InboxTransport, ReconnectingTransport, Cutter]:
    """A server's carrier, and a worker's transport that reaches it through a cutter. `keys`: of both."""
    # A length that a flipped bit has made too large is waited for.
    server = kind(Hello("job", SERVER_BASE), settings=Settings(
        resume=True, refused=lambda *_: None, keys=keys[0], hello_s=1.0 if keys[0] else 5.0))
    begun(server)
    cutter = Cutter(server.listen(host), [], host)
    carrier = kind(Hello("job", 0, session=b"s" * 16), settings=Settings(resume=True, keys=keys[1]))
    worker = ReconnectingTransport(carrier, window_s, **waits)
    worker.connect(SERVER_BASE, lambda deadline: carrier.dial(SERVER_BASE, cutter.address, deadline), soon())
    return server, worker, cutter


PUSH = Header(Kind.PUSH, 1, 3, 7, sender=0)


@pytest.mark.parametrize(("window_s", "refused", "words"), [
    (0.3, False, r"\b0\.3 s \(reconnect_s\).*refused"),
    (30.0, True, "refused"),
])
def test_server_that_stays_away_is_named(window_s: float, refused: bool, words: str) -> None:
    server, worker, cutter = pair(window_s, refused_is_over=refused)
    waiting = worker.request(SERVER_BASE, PUSH, b"payload")
    server.wait(server.recv(0), soon())
    cutter.close()
    # The second once the first has failed: before, the kernel may take it as if nothing were.
    for handle in (lambda: waiting, lambda: worker.request(SERVER_BASE, PUSH._replace(bucket=8), b"")):
        with pytest.raises(PeerLost, match=f"server 0: .*{words}.*E-PEER-LOST"):
            handle().wait(soon())
    worker.close()
    server.close()


def test_evicted_peer_receives_the_reason_and_does_not_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    server, worker, cutter = pair(30.0)
    waiting = worker.request(SERVER_BASE, PUSH, b"payload")
    server.abort(CorruptFrame("codec 9 with weight nan", peer="worker 0"), 0)
    assert_refused(outcome(lambda: waiting.wait(soon())), "E-FRAME", "server 0: ", "codec 9 ")
    worker.close()
    server.close()
    cutter.close()


def test_peer_evicted_between_welcome_and_connection_stays_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client counts as connected from the welcome on, so it can be evicted before its connection exists."""
    welcome = handshake.send_welcome
    ends: list[InboxTransport] = []

    def then_drop(*args: Any) -> None:
        welcome(*args)
        ends[0].abort(CorruptFrame("codec 9 with weight nan", peer="worker 0"), 0)

    monkeypatch.setattr(handshake, "send_welcome", then_drop)
    server, worker, cutter = pair(30.0, begun=ends.append)
    waiting = worker.request(SERVER_BASE, PUSH, b"payload")
    with pytest.raises(Refused) as caught:
        waiting.wait(soon())
    assert (caught.value.peer, "E-FRAME" in str(caught.value)) == ("server 0", True)
    for end in (worker, server, cutter):
        end.close()


def test_half_open_connection_is_replaced_by_the_new_one() -> None:
    """After a router has changed its address, the server's end is open and would stay open for minutes."""
    server, worker, cutter = pair(30.0)
    handle = worker.request(SERVER_BASE, PUSH, b"payload")
    assert bytes(server.wait(server.recv(0), soon()).body) == b"payload"
    cutter.break_near()
    assert bytes(server.wait(server.recv(0), soon()).body) == b"payload", "sent again on a new connection"
    server.send(0, PUSH._replace(kind=Kind.RESULT), b"sum")
    assert bytes(handle.wait(soon()).body) == b"sum"
    assert (worker.breaks, worker.resent_nbytes, worker.kept_nbytes) == (1, len(b"payload"), 0)
    worker.close()
    server.close()
    cutter.close()


def test_answers_that_no_request_waits_for_are_dropped() -> None:
    server, worker, cutter = pair(30.0)
    handle = worker.request(SERVER_BASE, PUSH, b"payload")
    server.wait(server.recv(0), soon())
    for number in (PUSH.step - 1, PUSH.step + 1, PUSH.step):
        server.send(0, PUSH._replace(kind=Kind.RESULT, step=number), b"sum")
    assert handle.wait(soon()).header.step == PUSH.step
    until(lambda: worker.repeats == 2, "both other answers have been dropped")
    for end in (worker, server, cutter):
        end.close()


LARGE, CUTS, PART_NBYTES = random.Random(1).randbytes(8 << 20), 3, 64 << 10
UNREAD_NBYTES = 2 << 20
"""Less than this is sent again after a cut: the part that was cut, and what a gRPC stream had not delivered yet."""


@pytest.mark.commit(2)
@pytest.mark.skipif(not credit.SUPPORTED, reason="bodies are cut on Linux only")
@pytest.mark.parametrize("kind", [InboxTransport, GrpcEnd], ids=["tcp", "grpc"])
@pytest.mark.parametrize("way", [UP, DOWN], ids=["up", "down"])
def test_large_body_continues_where_it_was_cut(kind: type[InboxTransport], way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent again is what was on its way, in three cuts of one body; it would be twice the body otherwise."""
    monkeypatch.setattr(credit, "MAX_PART_NBYTES", PART_NBYTES)
    pushes: list[Message] = []

    def take_pushes(server: InboxTransport) -> None:
        def arrived(message: Message) -> None:
            if message.header.kind == Kind.AGAIN:  # before the cut no whole part of it had been read
                server.send(0, PUSH._replace(kind=Kind.AGAIN))
                return
            pushes.append(message)
            server.send(0, PUSH._replace(kind=Kind.RESULT, weight=2.0), LARGE if way == DOWN else b"sum")

        server.arrived = arrived

    server, worker, cutter = pair(30.0, kind=kind, host=FAR, begun=take_pushes)
    for number in range(1, CUTS + 1):
        cutter.cut_next(Cut(way, number * len(LARGE) // (CUTS + 1), "close"))
    result = worker.request(SERVER_BASE, PUSH, LARGE if way == UP else b"payload").wait(soon())
    assert (bytes(pushes[0].body), bytes(result.body)) == ((LARGE, b"sum") if way == UP else (b"payload", LARGE))
    assert cutter.shots == worker.breaks == CUTS
    assert cutter.passed[way] - len(LARGE) < CUTS * UNREAD_NBYTES
    assert worker.kept_nbytes == 0
    for end in (worker, server, cutter):
        end.close()


def test_contribution_that_has_arrived_is_sent_again_only_if_the_server_asks() -> None:
    server, worker, cutter = pair(30.0)
    handle = worker.request(SERVER_BASE, PUSH, b"x" * ASK_NBYTES)
    assert len(server.wait(server.recv(0), soon()).body) == ASK_NBYTES
    cutter.break_all()
    asked = server.wait(server.recv(0), soon())
    assert (asked.header, bytes(asked.body)) == (PUSH._replace(kind=Kind.AGAIN), b"")
    until(lambda: worker.breaks == 1, "the break is counted")
    assert worker.resent_nbytes == 0
    for bucket in (PUSH.bucket, 1000):  # it has no contribution to that one
        server.send(0, asked.header._replace(sender=SERVER_BASE, bucket=bucket))
    assert bytes(server.wait(server.recv(0), soon()).body) == b"x" * ASK_NBYTES
    server.send(0, PUSH._replace(kind=Kind.RESULT), b"sum")
    assert bytes(handle.wait(soon()).body) == b"sum"
    assert worker.resent_nbytes == ASK_NBYTES
    for end in (worker, server, cutter):
        end.close()


def test_unfinished_body_is_for_the_same_process_only() -> None:
    server, worker, cutter = pair(30.0, host=FAR)
    cutter.cut_next(Cut(UP, len(LARGE) // 2, "close"))
    worker.stop_reconnecting()
    worker.request(SERVER_BASE, PUSH, LARGE)
    until(lambda: bool(broken_peers(server)), "the server knows that the line is cut")
    other = InboxTransport(Hello("job", 0, session=b"o" * 16), settings=Settings(resume=True))
    other.dial(SERVER_BASE, cutter.address, soon())
    before = cutter.passed[UP]
    other.send(SERVER_BASE, PUSH, LARGE)
    assert bytes(server.wait(server.recv(0), soon()).body) == LARGE
    assert cutter.passed[UP] - before >= len(LARGE)
    assert broken_peers(server) == []
    for end in (other, worker, server, cutter):
        end.close()


def test_dropped_peer_leaves_nothing() -> None:
    server, worker, cutter = pair(30.0, host=FAR)
    cutter.cut_next(Cut(UP, len(LARGE) // 2, "close"))
    worker.stop_reconnecting()
    worker.request(SERVER_BASE, PUSH, LARGE)
    until(lambda: broken_peers(server) == [0], "the server knows that the line is cut")
    server.abort(CorruptFrame("codec 9 with weight nan", peer="worker 0"), 0)
    assert broken_peers(server) == []
    for end in (worker, server, cutter):
        end.close()


def test_connections_without_progress_are_given_up() -> None:
    """Such as through a proxy that accepts every connection and forwards nothing."""
    server, worker, cutter = pair(1.0)
    ended = threading.Event()

    def always() -> None:
        while not ended.wait(0.02):
            cutter.break_all()

    breaks = threading.Thread(target=always, daemon=True)
    breaks.start()
    handle = worker.request(SERVER_BASE, PUSH, b"payload")
    assert_refused(outcome(lambda: handle.wait(soon())), "E-PEER-LOST", "PeerLost: ", "server 0: ", "1 s (reconnect_s)")
    ended.set()
    breaks.join()
    for end in (worker, server, cutter):
        end.close()


def test_second_process_of_a_rank_is_refused_while_the_first_is_connected() -> None:
    server, worker, cutter = pair(30.0)
    other = InboxTransport(Hello("job", 0, session=b"o" * 16), settings=Settings(resume=True))
    assert_refused(outcome(lambda: other.dial(SERVER_BASE, cutter.address, soon())), "E-RANK", "server 0: worker 0 ")
    for end in (other, worker, server, cutter):
        end.close()


PAIR, EXCHANGES = 2, 9
_ranks = rank_pool.ranks_first(PAIR)
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {}, "forward": {"overlap": "forward"}, "every": {"every": 3}, "round": {"every": 3, "overlap": "round"},
    "ddp": {}, "states": {},
}


def trained(rank: int, address: str, how: str, folder: str) -> tuple[list[torch.Tensor], dict[str, float]]:
    """In "states" servers are asked for their states, get them back, receive rollbacks, and switch to another plan."""
    model: Any = mlp(width=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    called = DistributedDataParallel(model, bucket_cap_mb=0.002) if how == "ddp" else model
    session = commlayer.attach(called, optimizer, compression=commlayer.compressors.topk(ratio=0.1),
                               config=rank_pool.quick(join=address), sync=sync_of(**WAYS[how]))
    for number in range(EXCHANGES):
        optimizer.zero_grad()
        x, y = data(rank, number)
        nn.functional.mse_loss(called(x), y).backward()
        if how == "states" and number == 2:
            optimizer.zero_grad()
            switch(distributed_job(session), plan_of(model, "int8()") if rank == 0 else None)
            continue
        optimizer.step()
        if how == "states" and number in (4, 6):
            session.checkpoint(folder, model=False) if number == 4 else session.resume(folder)
    session.flush()
    stats = session.metrics()
    session.close()
    return [p.detach().clone() for p in model.parameters()], stats


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", WAYS)
def test_training_continues_bit_for_bit(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cutters: list[Cutter] = []
    passed = [0, 0]
    chance, real = random.Random(how), messages.server_request

    def behind_a_cutter(address: str, *rest: Any, **more: Any) -> Any:
        cuts = [] if not any(passed) else [cut for _ in range(3) for cut in random_cuts(chance, *passed)]
        cutters.append(Cutter(host_port(address), cuts))
        return real(join_host(*cutters[-1].address), *rest, **more)

    monkeypatch.setattr(messages, "server_request", behind_a_cutter)
    results = []
    for name in ("plain", "cut"):
        with Servers(PAIR, 1) as servers:
            results.append(pool(PAIR).call(trained, servers.address, how, str(tmp_path / name)))
        passed = cutters[-1].passed
        cutters[-1].close()
    assert cutters[1].shots
    assert sum(stats["reconnects"] for _, stats in results[0]) == 0
    assert sum(stats["reconnects"] for _, stats in results[1]) > 0
    for (plain, _), (cut, _) in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))
