"""A summation server between its coordinator and two workers, and plans for it."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers import worker_client
from commlayer.cluster.servers.data_server import DataServer
from commlayer.cluster.servers.summation_server import Stalled
from commlayer.errors import CommError
from commlayer.planner import default_plan
from commlayer.records import Bucket, Epoch, Job, Member, Plan, ServerInfo, TensorInfo
from commlayer.transport.protocol import SERVER_BASE, Header, Kind
from support.coordinators import WAIT_S, Failures, quick, until

JOB = Job((TensorInfo("weight", (100,)),))
PLAN = default_plan(JOB, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096, cut_nbytes=4096)
BUCKET = PLAN.buckets[0]


def epoch_of(plan: bytes, serving: DataServer, world: int = 2) -> Epoch:
    members = tuple(Member(rank, rank, "host") for rank in range(world))
    return Epoch(1, members, (ServerInfo(0, serving.address),), messages.hash_plan_bytes(plan))


def plan_of(*buckets: Bucket, **fields: Any) -> Plan:
    return msgspec.structs.replace(PLAN, buckets=buckets or PLAN.buckets, **fields)


def changed(**fields: Any) -> Plan:
    return plan_of(msgspec.structs.replace(BUCKET, **fields))


class Pair:
    """A coordinator, a server and two connected workers in this process."""

    def __init__(self, opened: list[Any], plan: Plan = PLAN, deadline_s: float = 0.1, host: str = "127.0.0.1") -> None:
        config = quick(deadline_s=deadline_s, dead_after_s=WAIT_S)  # late heartbeats are no deaths here
        coordinator, self.serving, ended = Coordinator(config, servers=1), DataServer(host, 0, config), threading.Event()
        opened.extend((coordinator, self.serving))
        with ThreadPoolExecutor(3) as pool:
            seat = pool.submit(client.join, coordinator.address, messages.server_request(self.serving.address), config,
                               Failures(),
                               ended=ended)
            requests = [messages.worker_request(plan.job, rank, 2, plan=records.encode(plan)) for rank in range(2)]
            ups = [pool.submit(worker_client.connect, coordinator.address, request, config) for request in requests]
            member = seat.result(WAIT_S)
            opened.append(SimpleNamespace(close=member.leave))  # without a word it would be waited for
            self.serving.start(member.epoch, member.plan, member.rank)
            self.ups = [up.result(WAIT_S) for up in ups]
        opened.extend(self.ups)
        # A server welcomes a worker just before it can send to it unasked.
        until(lambda: len(self.serving.transport.peers) == len(self.ups), "both are connected")
        self.failures, self.stalled = Failures(), threading.Event()
        self.left: queue.Queue[tuple[str, int]] = queue.Queue()
        self.ups[1].subscribe(self.failures, lambda *_: self.stalled.set(), lambda *report: self.left.put(report), 1)

    def report_stall(self, stalled: Stalled) -> None:
        """The server sends this report to worker 1."""
        self.serving.transport.send(1, Header(Kind.STALLED, 1, sender=SERVER_BASE), msgspec.msgpack.encode(stalled))

    def failure(self) -> CommError:
        assert self.failures.came.wait(WAIT_S)
        error: CommError = self.failures.errors[0]
        return error


