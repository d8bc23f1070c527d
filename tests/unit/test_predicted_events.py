"""The simulated step, as a worker of each node would have recorded it."""

from __future__ import annotations

from msgspec import structs

from commlayer import planner
from commlayer.engine.trace import predict
from commlayer.observe.step_trace import EXCHANGE, NO_BUCKET, STEP, Event
from commlayer.planner.inputs import nodes_of
from commlayer.planner.model import Basis, Cluster, Link, Node, PlanInputs
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo, Timing

JOB = Job((TensorInfo("a", (5000,)), TensorInfo("b", (300,))), timing=Timing((2e-3, 1e-3), (0.0, 1e-3), 2e-3, 1e-3))
LAB = Node("lab", 2, "rtx3060", Link(5e8, 5e8, 1e-3), intra_bps=1e10, speed=0.5)
HOMES = tuple(structs.replace(n, ranks=2, intra_bps=1e10, server=False) for n in nodes_of("2xrtx3060@100/20Mb"))


def events(path: str, cluster: Cluster, hosts: tuple[int, ...], codec: str = "topk(ratio=0.1)") -> dict[int, list[Event]]:
    buckets = (Bucket(0, (Slice(1, 0, 300),), path, codec), Bucket(1, (Slice(0, 0, 5000),), path, codec))
    plan = Plan(JOB.digest(), buckets, servers=len(hosts), hosts=hosts, ranks_per_node=2)
    result = predict(Basis(plan, PlanInputs(JOB, cluster)))
    results = planner.simulate(plan, JOB, cluster)
    for mine in result.by_node.values():
        assert [e for e in mine if e.op == STEP] == [Event(STEP, NO_BUCKET, 0.0, results.step_s)]
        assert all(0 <= e.start_s <= e.end_s for e in mine)
    return result.by_node


def of_bucket(results: list[Event], bucket: int) -> list[str]:
    return [e.op for e in sorted(results, key=lambda e: e.start_s) if e.bucket == bucket]


SERVED = "node.reduce_scatter encode@cpu net.push net.pull decode@cpu node.allgather"
AS_RUN = ["node.reduce", "encode@cpu", EXCHANGE, "decode@cpu", "node.broadcast"]


def test_what_lies_between_push_and_result_is_one_exchange_in_the_runtimes_words() -> None:
    nodes = events(SERVED, Cluster((LAB, *HOMES), reachable=False), (0,))
    assert sorted(nodes) == [0, 1, 2]
    assert nodes[1] == nodes[2], "equal nodes"
    for node, mine in nodes.items():
        for bucket in (0, 1):
            assert of_bucket(mine, bucket) == AS_RUN
        sent = [e.nbytes for e in mine if e.op == EXCHANGE]
        assert all(sent) if node else not any(sent), "the host's own payload takes no wire"
    lab, home = ({e.op: e for e in nodes[n] if e.bucket == 1} for n in (0, 1))
    assert lab["encode@cpu"].end_s == lab[EXCHANGE].start_s
    assert home[EXCHANGE].end_s > lab[EXCHANGE].end_s > home[EXCHANGE].start_s, "the host waits for the homes' payloads"
