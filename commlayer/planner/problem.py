"""Builds the simulation's input: buckets with their options, as arrays.

An option is a list of a few tasks. `Network` numbers the lanes of one cluster (resources such as links and CPUs), so the arrays
of each `TaskGraph` (tasks without durations) are built once and only joined for each problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.planner.model import ZERO, LinearCost

Ints = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float64]

COMPUTE = "compute"
"""The lane on which a node computes gradients: "compute:NODE". Other tasks on this lane delay the gradients."""
SHARED = ("up", "down", "intra")
"""Kinds of lanes that carry several transfers at the same time."""
_SHARED = tuple(f"{kind}:" for kind in SHARED)
STEPS_IF_STALE = 4
"""Number of simulated steps if buckets are stale: transfers overlap the next step, so the step time is the mean of the last two
steps."""


class Task(NamedTuple):
    """A part of a bucket's work. The task starts on all its lanes together and occupies each lane for its own time. A transfer
    occupies the sender's uplink and the receiver's downlink. Seconds and bytes are linear functions of the bucket's
    elements."""

    lanes: tuple[tuple[str, LinearCost], ...]
    after: tuple[int, ...] = ()
    """Indices of the same option's tasks that must end before this task starts. Empty: the task starts when the gradient is
    ready."""
    latency: LinearCost = ZERO
    """Delay in seconds from the end of the task's work on links, CPUs or GPUs to the end of the task."""
    op: str = ""
    """The operation that the task belongs to. Transfers of one operation between the same ends share a connection."""
    nbytes: LinearCost = ZERO


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of one option and their dependencies, without durations, as arrays by task. `next` and `gate` have several
    entries per task: they are concatenated, and `followed` and `gated` count the entries of each task."""

    lanes: tuple[tuple[str, ...], ...]
    after: tuple[tuple[int, ...], ...]
    ops: tuple[str, ...]
    held: Ints
    """Number of lanes (links, CPUs, GPUs) that each task uses."""
    queue: Ints
    """Number of the queue in which the task waits (see `Network`); -1 for a task that uses no link, CPU or GPU."""
    need: Ints
    """Number of tasks and gates for which each task waits."""
    followed: Ints
    next: Ints
    """The tasks that wait for each task."""
    gated: Ints
    gate: Ints
    """The nodes whose gradients each task waits for; none unless it is a first task."""

    @property
    def arrays(self) -> tuple[Ints, ...]:
        return self.held, self.queue, self.need, self.followed, self.next, self.gated, self.gate


class Template(NamedTuple):
    """One or several options for buckets of every size: each array row is (floor, slope), a linear function of the bucket's
    elements."""

    tasks: tuple[Task, ...]
    graphs: tuple[TaskGraph, ...]
    seconds: Reals
    """Seconds that each task occupies each of its lanes (links, CPUs, GPUs)."""
    latency: Reals

    def at(self, numel: Any) -> tuple[Reals, Reals]:
        """The tasks' seconds and latencies for a number of elements, or for a column of such numbers."""
        return self.seconds[:, 0] + self.seconds[:, 1] * numel, self.latency[:, 0] + self.latency[:, 1] * numel

    def load(self, numel: float, urgency: float = 0.0, *, stale: bool = False) -> Load:
        return Load(self.graphs, *self.at(numel), urgency, stale)

    @property
    def nbytes(self) -> float:
        """Bytes per element, summed over all of the bucket's transfers on one node's links."""
        return sum([task.nbytes.slope_s for task in self.tasks])


class Load(NamedTuple):
    """One bucket and its options (path and codec): the tasks of each option, and the tasks' durations in one array."""

    graphs: tuple[TaskGraph, ...]
    seconds: Reals
    latency: Reals
    urgency: float = 0.0
    """Seconds after which the next forward pass needs the bucket. Among waiting buckets, the one with the smallest value is
    sent first."""
    stale: bool = False


class Problem(NamedTuple):
    """The arrays of cml_schedule in native/include/commlayer.h, under the same names."""

    nodes: int
    lanes: tuple[str, ...]
    steps: int
    priority: bool
    ready: Reals
    ready_order: Ints
    order: Ints
    stale: Ints
    lane_node: Ints
    lane_shared: Ints
    tail: float
    bucket_options: Ints
    option_tasks: Ints
    line_lanes: Ints
    line_lane: Ints
    task_line: Ints
    task_seconds: Ints
    seconds: Reals
    latency: Reals
    need: Ints
    task_next: Ints
    next: Ints
    task_gates: Ints
    gate: Ints
    most_tasks: int

    @property
    def buckets(self) -> int:
        return len(self.order)


class Network:
    """Numbers a cluster's lanes (links, CPUs, GPUs) and queues. A queue runs one task at a time: it is either a lane that is
    not shared, or a connection (one operation over shared lanes)."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Creates an empty numbering. `nodes`: names of the nodes that compute gradients."""
        self.nodes = {name: i for i, name in enumerate(nodes)}
        self._lanes: dict[str, int] = {}
        self._queues: list[tuple[int, ...]] = []
        """The lane numbers of each queue."""
        self._queue_of: dict[tuple[str, tuple[str, ...]], int] = {}
        self._graphs: dict[object, TaskGraph] = {}
        self._joined: dict[tuple[TaskGraph, ...], tuple[Ints, ...]] = {}

    def template(self, tasks: Sequence[Task]) -> Template:
        lanes = tuple([tuple([lane for lane, _ in task.lanes]) for task in tasks])
        graph = self.task_graph(lanes, tuple([task.after for task in tasks]), tuple([task.op for task in tasks]))
        return Template(tuple(tasks), (graph,), _rows([seconds for task in tasks for _, seconds in task.lanes]),
                        _rows([task.latency for task in tasks]))

    def task_graph(self, lanes: tuple[tuple[str, ...], ...], after: tuple[tuple[int, ...], ...],
                   ops: tuple[str, ...]) -> TaskGraph:
        """The tasks' structure without durations. For each task, `lanes` has the links, CPUs and GPUs it uses, `after` the
        preceding tasks, `ops` its operation."""
        key = lanes, after, ops
        if key not in self._graphs:
            followers: list[list[int]] = [[] for _ in after]
            for place, earlier in enumerate(after):
                for before in earlier:
                    followers[before].append(place)
            # A first task waits for the gradients of the nodes whose lanes it uses, or of all nodes if it uses no node's lane.
            gates = [() if earlier else tuple(sorted({self._owner(lane) for lane in mine} - {-1})) or tuple(self.nodes.values())
                     for mine, earlier in zip(lanes, after, strict=True)]
            self._graphs[key] = TaskGraph(
                lanes, after, ops, held=_ints(map(len, lanes)),
                queue=_ints([self._queue(op, mine) if mine else -1 for op, mine in zip(ops, lanes, strict=True)]),
                need=_ints([len(earlier) + len(gate) for earlier, gate in zip(after, gates, strict=True)]),
                followed=_ints(map(len, followers)), next=_ints(chain.from_iterable(followers)),
                gated=_ints(map(len, gates)), gate=_ints(chain.from_iterable(gates)))
        return self._graphs[key]

    def with_final_task(self, graph: TaskGraph) -> TaskGraph:
        """The same tasks with an additional final task, which uses no link, CPU or GPU and waits for the last tasks."""
        last = tuple(sorted({*range(len(graph.after))} - {before for after in graph.after for before in after}))
        return self.task_graph((*graph.lanes, ()), (*graph.after, last), (*graph.ops, ""))

    def problem(
        self, loads: Sequence[Load], ready: Reals, *, tail_s: float = 0.0, priority: bool = True,
    ) -> Problem:
        """The arrays for simulating any choice among the options. `ready`: by node and bucket, seconds until the gradient is
        final; the last column is the end of the node's computing."""
        graphs = [load.graphs for load in loads]
        tasks, held, queue, need, followed, following, gated, gate = map(_concat,
                                                                         zip(*map(self._join_graphs, graphs), strict=True)) \
            if loads else [_ints(())] * 8
        stale = _ints([load.stale for load in loads])
        queues, task_line = _renumber(queue, len(self._queues))
        mine = [self._queues[number] for number in queues]
        used, line_lane = _renumber(_ints(chain.from_iterable(mine)), len(self._lanes))
        names = list(self._lanes)
        lanes = tuple([names[number] for number in used])
        bucket_options = _offsets(_ints(map(len, graphs)))
        return Problem(
            nodes=len(ready), lanes=lanes, steps=STEPS_IF_STALE if stale.any() else 1, priority=priority,
            ready=np.ascontiguousarray(ready, np.float64).ravel(),
            ready_order=_ints(np.argsort(ready[:, :-1], axis=1, kind="stable").ravel()),
            order=_ints(np.argsort([load.urgency for load in loads], kind="stable")), stale=stale,
            lane_node=_ints([self._owner(lane) if lane.startswith(COMPUTE) else -1 for lane in lanes]),
            lane_shared=_ints([lane.startswith(_SHARED) for lane in lanes]), tail=tail_s,
            bucket_options=bucket_options, option_tasks=_offsets(tasks),
            line_lanes=_offsets(_ints(map(len, mine))), line_lane=line_lane, task_line=task_line, task_seconds=_offsets(held),
            seconds=_concat([load.seconds for load in loads]), latency=_concat([load.latency for load in loads]),
            need=need, task_next=_offsets(followed), next=following, task_gates=_offsets(gated), gate=gate,
            most_tasks=int(np.maximum.reduceat(tasks, bucket_options[:-1]).sum()) if loads else 0)

    def _join_graphs(self, graphs: tuple[TaskGraph, ...]) -> tuple[Ints, ...]:
        """The number of tasks of each `TaskGraph` (tasks without durations), and the joined arrays of all graphs."""
        if graphs not in self._joined:
            columns = zip(*[graph.arrays for graph in graphs], strict=True)
            self._joined[graphs] = _ints([len(graph.after) for graph in graphs]), *map(_concat, columns)
        return self._joined[graphs]

    def _queue(self, op: str, lanes: tuple[str, ...]) -> int:
        if not lanes[0].startswith(_SHARED):
            op = ""
        key = op, lanes
        if key not in self._queue_of:
            self._queue_of[key] = len(self._queues)
            self._queues.append(tuple([self._lanes.setdefault(lane, len(self._lanes)) for lane in lanes]))
        return self._queue_of[key]

    def _owner(self, lane: str) -> int:
        """The index of the node that a lane name such as "up:NODE" or "cpu:NODE.OWNER" contains; -1 if the node does not
        train."""
        name = lane.partition(":")[2]
        return self.nodes.get(name, self.nodes.get(name.rpartition(".")[0], -1))


def join_templates(templates: Sequence[Template]) -> Template:
    return Template(tuple(chain.from_iterable([each.tasks for each in templates])),
                    tuple(chain.from_iterable([each.graphs for each in templates])),
                    _concat([each.seconds for each in templates]), _concat([each.latency for each in templates]))


def add_final_delays(network: Network, loads: Sequence[Load], seconds: Sequence[float]) -> list[Load]:
    """Adds a final delay of `seconds[b]` to all options of bucket b, during which no link, CPU or GPU is used."""
    return [load._replace(graphs=tuple([network.with_final_task(graph) for graph in load.graphs]),
                          latency=np.insert(load.latency, np.cumsum([len(graph.after) for graph in load.graphs]), latency_s))
            for load, latency_s in zip(loads, seconds, strict=True)]


def _rows(lines: Sequence[LinearCost]) -> Reals:
    return np.array([(line.floor_s, line.slope_s) for line in lines], np.float64).reshape(-1, 2)


def _ints(values: Iterable[Any] | Ints) -> Ints:
    return np.array(values if isinstance(values, np.ndarray) else list(values), np.int32)


def _renumber(values: Ints, count: int) -> tuple[list[int], Ints]:
    """The distinct values from 0 to `count`, and each value's index among them; negative values stay."""
    used = np.zeros(count, bool)
    used[values[values >= 0]] = True
    return np.flatnonzero(used).tolist(), np.where(values < 0, values, (np.cumsum(used) - 1)[values]).astype(np.int32) \
        if count else values


def _offsets(counts: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _concat(arrays: Sequence[Any]) -> Any:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)
