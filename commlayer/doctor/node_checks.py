"""The nodes of a comparison, the schedule in which pairs are measured, and the judgement of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commlayer.doctor.finding import Finding, fail, ok, warn
from commlayer.doctor.machine_facts import Software
from commlayer.doctor.server_checks import CLOCK_FAIL_S, CLOCK_S, rate, spell
from commlayer.records import Record


class Node(Record, frozen=True):
    """A node's description of itself. `plan`: the hash of its plan file, empty for none.

    `clock`: for each of some barriers, the node's time when it arrived, and its time when it learned that all had arrived. On
    the clock of every node, the arrival of the last node lies between the two.
    """

    host: str
    address: str
    software: Software | None = None
    torch: str = ""
    plan: str = ""
    clock: tuple[tuple[float, float], ...] = ()


class Pair(Record, frozen=True):
    """A measurement from node `a` to node `b`. `error`: why it failed."""

    a: int
    b: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""


def turns(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as possible. In a round each node is in at most one pair.

    >>> turns(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> [len(one) for one in turns(5)]
    [2, 2, 2, 2, 2]
    """
    seats = nodes + nodes % 2
    ring = [*range(1, seats)]
    rounds = []
    for shift in range(seats - 1):
        row = [0, *ring[len(ring) - shift :], *ring[: len(ring) - shift]]
        pairs = [tuple(sorted((row[i], row[seats - 1 - i]))) for i in range(seats // 2)]
        rounds.append(sorted((a, b) for a, b in pairs if b < nodes))
    return rounds


LINKS_S, TURN_S = 30.0, 3.0
"""Time limits for links that answer late, and for each round."""


def limit_s(nodes: int, join_deadline_s: float = 0.0) -> float:
    """The limit for the whole measurement: from a node's arrival, or with deadline 0 from the arrival of all nodes."""
    return join_deadline_s + LINKS_S + TURN_S * len(turns(nodes))


def slowest(pairs: Sequence[Pair]) -> Pair:
    return min((pair for pair in pairs if not pair.error), key=lambda pair: min(pair.up_bps, pair.down_bps))


def one_commlayer(nodes: Sequence[Node]) -> bool:
    """Whether all nodes speak the same protocol, which measuring links needs."""
    return len({_commlayer(node) for node in nodes}) == 1


def alike(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Checks what must be equal on all ranks of a job: otherwise the job does not start."""
    differ = [
        (_apart(nodes, [_commlayer(node) for node in nodes]), "; so links are not measured",
         "install the same version of commlayer on all machines"),
        (_apart(nodes, [f"torch {node.torch.partition('+')[0]}" for node in nodes]), "",
         "install the same version of torch on all machines"),
        (_apart(nodes, [_python(node) for node in nodes]), "", "use the same version of Python on all machines"),
        (_apart(nodes, [f"plan with hash {node.plan}" if node.plan else "no plan" for node in nodes]), "",
         "give all nodes the same plan file"),
    ]
    failed = [fail("nodes", seen + so, remedy) for seen, so, remedy in differ if seen]
    yield from failed or [ok("nodes", f"the same versions{' and the same plan' if nodes[0].plan else ''} on all {len(nodes)}")]


def _commlayer(node: Node) -> str:
    f = node.software
    return f"commlayer {f.commlayer} (control protocol {f.protocol}, wire format {f.wire})" if f else "another commlayer"


def _python(node: Node) -> str:
    return f"Python {node.software.python.rpartition('.')[0]}" if node.software else "another Python"


def _apart(nodes: Sequence[Node], said: Sequence[str]) -> str:
    """Lists differing values with their nodes, the rarest first. Empty if all are equal.

    >>> nodes = [Node(host, "") for host in "abcd"]
    >>> _apart(nodes, ["x", "y", "x", "x"]), _apart(nodes[:2], ["x", "y"]), _apart(nodes[:2], ["x", "x"])
    ('y on node 1 (b), x on the 3 others', 'x on node 0 (a), y on node 1 (b)', '')
    """
    by = {what: [number for number, each in enumerate(said) if each == what] for what in dict.fromkeys(said)}
    *few, (most, of) = sorted(by.items(), key=lambda row: len(row[1]))
    if not few:
        return ""
    last = f"the {len(of)} others" if len(of) > 2 else _names(nodes, of)
    return ", ".join([*(f"{what} on {_names(nodes, who)}" for what, who in few), f"{most} on {last}"])


def _names(nodes: Sequence[Node], numbers: Sequence[int]) -> str:
    return " and ".join(f"node {number} ({nodes[number].host})" for number in numbers)


def clocks(nodes: Sequence[Node], *, keys: bool) -> Iterator[Finding]:
    """Compares clocks with the median one, so that the wrong ones are named. `keys`: certificates depend on the clocks."""
    if not all(node.clock for node in nodes):
        return
    middle = sorted(range(len(nodes)), key=lambda number: ahead(nodes[number], nodes[0])[0])[(len(nodes) - 1) // 2]
    off = [ahead(node, nodes[middle]) for node in nodes]
    wrong = [number for number, (by_s, error_s) in enumerate(off) if number != middle and abs(by_s) - error_s >= CLOCK_S]
    if not wrong:
        within_s = max(max(abs(by_s), error_s) for number, (by_s, error_s) in enumerate(off) if number != middle)
        yield ok("nodes", f"clocks within {max(within_s, 0.001):.3g} s of that of {_names(nodes, [middle])}")
        return
    each = [f"{_names(nodes, [number])} {spell(abs(off[number][0]))} {'ahead of' if off[number][0] > 0 else 'behind'}"
            for number in wrong]
    seen = f"clocks: {', '.join(each)} {_names(nodes, [middle])}"
    remedy = "set them by a time server: timedatectl set-ntp true"
    if keys and any(abs(off[number][0]) > CLOCK_FAIL_S for number in wrong):
        yield fail("nodes", f"{seen}: certificates are judged by them", remedy)
    else:
        yield warn("nodes", f"{seen}: logs will not fit together", remedy)


def ahead(a: Node, b: Node) -> tuple[float, float]:
    """Seconds by which the clock of `a` exceeds that of `b`, and the error of that, by the barrier with the tightest bounds.

    >>> ahead(Node("a", "", clock=((100.0, 109.0), (110.0, 110.2))), Node("b", "", clock=((8.0, 8.2), (9.0, 9.2))))
    (101.0, 0.2)
    """
    bounds = [(mine[0] - its[1], mine[1] - its[0]) for mine, its in zip(a.clock, b.clock, strict=True)]
    low, high = min(bounds, key=lambda bound: bound[1] - bound[0])
    return round((low + high) / 2, 6), round((high - low) / 2, 6)


UNEVEN = 4.0
"""A link this many times slower than the median alone sets the pace of collectives."""


def links(nodes: Sequence[Node], pairs: Sequence[Pair]) -> Iterator[Finding]:
    names = [f"{number} ({node.host})" for number, node in enumerate(nodes)]
    for pair in (pair for pair in pairs if pair.error):
        yield fail("nodes", f"node {names[pair.a]} to node {names[pair.b]} at {nodes[pair.b].address}: {pair.error}",
                   "open ports between them, or have both join one server: commlayer serve, --join")
    good = [pair for pair in pairs if not pair.error]
    if not good:
        return
    rates = sorted(min(pair.up_bps, pair.down_bps) for pair in good)
    slow, median = slowest(good), rates[len(rates) // 2]
    count = "1 link" if len(good) == 1 else f"{len(good)} links"
    seen = f"{count}, slowest {rate(rates[0])} between node {names[slow.a]} and node {names[slow.b]}"
    if len(good) > 2 and rates[0] * UNEVEN < median:
        yield warn("nodes", f"{seen}, the median {rate(median)}", "look at that link, or plan for it: commlayer plan make")
    else:
        yield ok("nodes", seen)
