"""Fuzzes frames and control messages: millions of inputs at the decoders, and some of them at the sockets of a running server.

At the sockets, strangers send damaged greetings and noise to both ports, members with the secret send damaged frames, and calls
with valid proofs carry damaged messages. The server must close each connection in time, and the sums of two honest members must
continue and be correct.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import torch

from bench import Unmeasurable
from bench.report import Result
from commlayer.cluster.calls.call_proofs import AuthenticationFailed
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.compressors import make_codec, seed
from commlayer.config import host_port
from commlayer.errors import CommError
from commlayer.transport import handshake
from commlayer.transport.endpoint import Settings
from commlayer.transport.framing import Reader
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key
from tests.chaos import fuzz
from tests.chaos.fuzz_mutate import mutated, resealed
from tests.chaos.fuzz_server import HONEST, PLAN
from tests.chaos.fuzz_targets import SECRET, Target, targets
from tests.support.mailbox import InboxTransport

ROOT = Path(__file__).parents[2]
PART, LEAST, MOST = 50, 200, 20_000
"""One in PART inputs also goes to the sockets, within LEAST and MOST. Each fuzzing member uses a rank of its own."""
SUM_EVERY = 100
PATIENCE_S = 10.0
"""Longer than the server's timeout for a greeting."""
FEWEST = 5
"""Minimum number of memory samples in a quarter of the run. Large buffers come and go, so the minimum of the last quarter is
compared with that of the second."""
MOST_GROWTH_PCT, MOST_THREADS = 5.0, 100
MOST_FINDINGS = 20
CALLS = ("Join", "Heartbeat", "Watch", "Leave", "KvRequest", "Status", "PlanPart", "Events")
RECORDS = {"Watch": "WatchRequest", "Status": "StatusRequest", "Events": "EventsRequest"}
"""Calls whose record has another name."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Otherwise each thread's allocator keeps what its connection has freed, and measured memory differs from memory in use."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The first bytes of HTTP/2."""


def run(inputs: int, first: int) -> Result:
    """`first`: the first seed."""
    decoders = fuzz.fuzz(targets(), inputs, first)
    with tempfile.TemporaryFile("w+") as stderr_file, _Server(stderr_file) as server:
        sockets = Sockets(server, random.Random(first)).run(min(MOST, max(LEAST, inputs // PART)))
    summary = decoders["summary"] | {f"sockets.{name}": value for name, value in sockets["summary"].items()}
    right = not decoders["summary"]["findings"] and decoders["summary"]["memory_flat"] and not sockets["code"]
    return {"rows": decoders["rows"] + sockets["rows"], "summary": summary, "code": int(not right)}


class _Server:
    """The process of fuzz_server.py. Use it as a context."""

    def __init__(self, said: Any) -> None:
        self._said = said
        self.process = subprocess.Popen([sys.executable, "-m", "tests.chaos.fuzz_server"], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                                        env=os.environ | ONE_ARENA)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise Unmeasurable(f"the server did not start: {(self.lines() or ['it said nothing'])[-1]}")
        self.data, self.control = (json.loads(line)[name] for name in ("data", "control"))

    def lines(self) -> list[str]:
        self._said.seek(0)
        return [str(line) for line in self._said.read().splitlines()]

    def held(self) -> tuple[int, int, int]:
        """Its memory in bytes, its number of threads, its number of open files."""
        place = Path(f"/proc/{self.process.pid}")
        pages = int((place / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(place / "task")), len(os.listdir(place / "fd"))

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Sockets:
    def __init__(self, server: _Server, chance: random.Random) -> None:
        self._server, self._chance = server, chance
        self._by_name = {target.name: target for target in targets()}
        self._rank = HONEST
        """Rank of the next member that breaks the protocol; each has a rank of its own."""
        self._ends: Counter[str] = Counter()
        self._slowest: dict[str, float] = {}
        self._findings: list[dict[str, Any]] = []

    def run(self, inputs: int) -> Result:
        ways: dict[str, Callable[[], str]] = {
            "strangers' greetings": self.greeting, "strangers' noise": self._noise, "members' frames": self.frames,
            "members' calls": self._call}
        chosen = self._chance.choices(list(ways), (3.0, 1.0, 4.0, 4.0), k=inputs)
        held, slowest_sum = [self._server.held()], 0.0
        begin = time.monotonic()
        with ExitStack() as stack:
            honest = _Honest(self._server.data, stack)
            self._channel = CoordinatorChannel(self._server.control, SECRET)
            stack.callback(self._channel.close)
            for number, name in enumerate(chosen):
                try:
                    if number % SUM_EVERY == 0 or number == inputs - 1:
                        slowest_sum = max(slowest_sum, honest.sum())
                        held.append(self._server.held())
                    began = time.monotonic()
                    self._note(name, number, ways[name](), time.monotonic() - began)
                except (CommError, ValueError, OSError) as error:
                    self._note(name, number, f"members do not continue, or none can join: {type(error).__name__}: {error}", 0.0)
                    break
            if self._server.process.poll() is None:
                time.sleep(1.0)  # its threads end after their connections
                held.append(self._server.held())
            else:
                self._note(name, number, f"the server ended with exit code {self._server.process.returncode}", 0.0)
        bugs = sum("Traceback" in line for line in self._server.lines())
        first, last = held[len(held) // 4 : len(held) // 2], held[-(len(held) // 4) :]
        growth = 100 * (min(last)[0] / min(first)[0] - 1) if len(last) >= FEWEST else float("nan")
        rows = [{"socket": name, "inputs": self._ends[name], "slowest_ms": 1e3 * self._slowest.get(name, 0.0)} for name in ways]
        summary = {
            "inputs": sum(self._ends.values()), "findings": len(self._findings), "tracebacks": bugs,
            "sums_of_others": len(held) - 2, "slowest_sum_ms": 1e3 * slowest_sum, "server_mib": held[-1][0] / 2**20,
            "server_growth_pct": growth, "threads": held[-1][1], "files": held[-1][2],
            "inputs_per_s": inputs / (time.monotonic() - begin)}
        wrong = self._findings or bugs or growth > MOST_GROWTH_PCT or max(held[-1][1:]) > MOST_THREADS
        return {"rows": [*rows, *self._findings], "summary": summary, "code": int(bool(wrong))}

    def _note(self, name: str, number: int, problem: str, spent_s: float) -> None:
        self._ends[name] += 1
        self._slowest[name] = max(self._slowest.get(name, 0.0), spent_s)
        if problem and len(self._findings) < MOST_FINDINGS:
            self._findings.append({"socket": name, "number": number, "finding": problem[:300]})

    def _damaged(self, target: Target) -> bytes:
        data = mutated(self._chance, target.examples)
        return resealed(data) if target.frames and self._chance.random() < 0.7 else data

    def greeting(self) -> str:
        return self._said(self._server.data, self._damaged(self._by_name["acceptor's greeting"]))

    def _noise(self) -> str:
        where = self._chance.choice((self._server.data, self._server.control))
        return self._said(where, mutated(self._chance, [PREFACE, bytes(64), self._chance.randbytes(300)]))

    def frames(self) -> str:
        """Damaged frames from a member after a valid handshake. An input that ends within a frame also ends the connection."""
        rank, self._rank = self._rank, self._rank + 1
        sock = socket.create_connection(host_port(self._server.data), PATIENCE_S)
        with sock:
            try:
                mine = Hello("job", rank, session=new_nonce())
                handshake.dial_handshake(sock, Reader(handshake.MAX_NBYTES), mine, SECRET, SERVER_BASE,
                                         time.monotonic() + PATIENCE_S)
            except CommError as error:
                return f"a member could not join: {error}"
            target = self._by_name[self._chance.choice(("frames", "sums"))]
            return self._heard_out(sock, self._damaged(target))

    def _said(self, address: str, data: bytes) -> str:
        with socket.create_connection(host_port(address), PATIENCE_S) as sock:
            return self._heard_out(sock, data)

    def _heard_out(self, sock: socket.socket, data: bytes) -> str:
        """Sends the data, then reads until the peer closes."""
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(PATIENCE_S)
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            return f"the connection was still open after {PATIENCE_S:g} s: {data[:500].hex()}"
        except OSError:
            pass  # the server may end the connection with unread data
        return ""

    def _call(self) -> str:
        """A damaged call from a caller that knows the secret."""
        method = self._chance.choice(CALLS)
        data = mutated(self._chance, self._by_name[f"control {RECORDS.get(method, method)}"].examples)
        try:
            self._channel._asker.ask(method, data, PATIENCE_S)
        except grpc.RpcError as error:
            refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            return "" if error.code() in refused else f"{method}: {error.code().name}: {error.details()}: {data[:500].hex()}"
        except AuthenticationFailed:
            return f"{method}: a call that was proved was not taken for it"
        return ""


class _Honest:
    """Members that follow the protocol."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._ends, self._step = [], 0
        for rank in range(HONEST):
            end = InboxTransport(Hello("job", rank, session=new_nonce()), settings=Settings(secret=SECRET))
            stack.callback(end.close)
            end.dial(SERVER_BASE, host_port(address), time.monotonic() + PATIENCE_S)
            self._ends.append(end)

    def sum(self) -> float:
        """Runs a step of every bucket and returns its seconds. CommError if a sum does not come, ValueError if it is wrong."""
        begin = time.monotonic()
        for bucket in PLAN.buckets:
            codec = make_codec(bucket, plan=PLAN)
            payload, out = memoryview(bytearray(codec.bound(bucket.spec))), torch.zeros(bucket.numel)
            handles = []
            for end in self._ends:
                state = codec.init(bucket.spec)
                seed(state, "fuzz", bucket.id, end.rank)
                header = Header(Kind.PUSH, 1, self._step, bucket.id, codec=codec.id, sender=end.rank, weight=1.0, total=2.0)
                handles.append((end, end.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT)))))
                nbytes = codec.start(torch.full((bucket.numel,), end.rank + 1.0), state, payload)
                end.send(SERVER_BASE, header, bytes(payload[:nbytes]))
            for end, handle in handles:
                codec.decode(end.wait(handle, begin + PATIENCE_S).body, {}, out)
                if not torch.equal(out, torch.full_like(out, HONEST * (HONEST + 1) / 2)):
                    raise ValueError(f"a sum of honest members is wrong in step {self._step}, bucket {bucket.id}")
        self._step += 1
        return time.monotonic() - begin
