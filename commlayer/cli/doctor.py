"""`commlayer doctor`: what commlayer/doctor finds on this machine, on the screen and in a file. Knows no check."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commlayer.config import Config, host_port, launcher_says, master, read_config, read_launch
from commlayer.errors import CommError, RecordError

if TYPE_CHECKING:
    from commlayer.doctor.finding import Finding
    from commlayer.doctor.looks import Asked
    from commlayer.doctor.node_checks import Node, Pair

PAGE = 80


def doctor(
    join: Annotated[str, typer.Option(help="host:port of the coordinator that the run is to join.", metavar="ADDR")] = "",
    master_: Annotated[str, typer.Option("--master", help="host:port where ranks of a cluster meet, else MASTER_ADDR.",
                                         metavar="ADDR")] = "",
    nodes: Annotated[int, typer.Option(help="How many nodes look at once, each with the same line: measures all links.",
                                       min=0)] = 0,
    plan: Annotated[Path | None, typer.Option(help="The plan file that the run is to use.", metavar="FILE")] = None,
    save: Annotated[Path, typer.Option(help="The folder for checkpoints.", metavar="DIR")] = Path("."),
    bind: Annotated[str, typer.Option(help="Address that this machine is to listen on.", metavar="HOST")] = "",
    port: Annotated[int, typer.Option(help="Port for a coordinator here; its data port is the next one.")] = 0,
    keys: Annotated[str, typer.Option(help="This node's folder of keys, else COMMLAYER_KEYS.", metavar="DIR")] = "",
    journal: Annotated[str, typer.Option(help="The folder for the journal of a server here.", metavar="DIR")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text on addresses other than loopback.")] = False,
    no_bandwidth: Annotated[bool, typer.Option("--no-bandwidth", help="Do not measure the link, which takes 2 s.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write findings and facts there, too.", metavar="FILE")] = None,
) -> None:
    """Look for what stands in the way of a run on this machine. Exit code 2 if something has to be mended first."""
    from commlayer.cli.plan_inputs import check_json

    check_json(json)
    given = {"join": join, "bind": bind, "port": port, "keys": keys, "journal": journal, "insecure": insecure}
    asked = _asked({name: value for name, value in given.items() if value}, master_, nodes, plan, save)
    # Here, since checks load numpy, which --help does without.
    from rich.console import Console

    from commlayer.doctor import screen
    from commlayer.doctor.examination import examine
    from commlayer.doctor.finding import of_error, usable
    from commlayer.doctor.looks import Seen, link, looks

    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=PAGE)
    findings: list[Finding] = []

    def show(found: Finding) -> None:
        findings.append(found)
        screen.show(console, found)

    if asked.problem:
        show(of_error("settings", asked.problem))
    seen = Seen()
    for found in examine([*looks(asked, seen)]):
        show(found)
    if not no_bandwidth and (last := link(asked, seen)) is not None:
        for found in examine([last]):
            show(found)
    rows: tuple[list[Node], list[Pair]] = ([], [])
    if nodes > 1:
        rows = _between(asked, show)
        if rows[1]:
            console.print("\n".join(screen.table(*rows)))
    console.print(screen.summary(findings))
    _write(json, findings, seen.facts, rows)
    if not usable(findings):
        raise typer.Exit(2)


def _asked(given: dict[str, Any], where: str, nodes: int, plan: Path | None, save: Path) -> Asked:
    from commlayer.doctor.looks import Asked

    port = launcher_says("MASTER_PORT")
    meet = host_port(where) if where else (master(), int(port) if port.isdecimal() else 0)
    launched = bool(meet[1]) and read_launch().world > 1 and not where
    problem = ""
    try:
        config = read_config(given)
    except RecordError as error:
        problem, config = str(error), _without_checks(given)
    return Asked(config, problem, meet, launched, nodes, plan, save)


def _without_checks(given: dict[str, Any]) -> Config:
    """As much as can be told all the same: a wrong setting must not hide what else is wrong."""
    for left_out in ({"keys"}, {"keys", "join", "bind"}, set(given)):
        try:
            return read_config({name: value for name, value in given.items() if name not in left_out} | {"insecure": True},
                               environ={"COMMLAYER_CONFIG": ""})
        except RecordError:
            continue
    return Config()


def _between(asked: Asked, show: Any) -> tuple[list[Node], list[Pair]]:
    """All links between nodes that look at once; what keeps them from it is a finding."""
    from commlayer.config import check_plain_text
    from commlayer.doctor import network_facts, node_checks, node_facts
    from commlayer.doctor.finding import of_error
    from commlayer.doctor.node_checks import Node
    from commlayer.transport import own_address

    (host, number), limit_s = asked.master, asked.config.join_deadline_s
    try:
        if asked.problem:
            raise ValueError("links between nodes are not measured: mend the settings first")
        if not number:
            raise ValueError("links between nodes: nobody says where they meet: start with torchrun, or say --master HOST:PORT")
        launch = read_launch()
        address = network_facts.own_towards(host) or own_address.default_address()
        check_plain_text("address of this node", address, asked.config)
        if asked.launched:
            meeting, count = node_facts.launched_store(launch.rank, launch.world, limit_s), launch.world
        else:
            own, count = network_facts.look_up("", host).own, asked.nodes
            meeting = node_facts.store_at(host, number, count, own, limit_s)
        me = Node(socket.gethostname(), address)
        found, pairs = node_facts.measured(meeting, count, me, asked.config, limit_s)
    except (CommError, ValueError, OSError) as error:
        show(of_error("nodes", error))
        return [], []
    for finding in node_checks.links(found, pairs):
        show(finding)
    return found, pairs


def _write(json: Path | None, findings: list[Finding], facts: dict[str, Any], rows: tuple[list[Node], list[Pair]]) -> None:
    import msgspec

    from commlayer.cli.plan_inputs import write_json
    from commlayer.doctor.finding import usable

    told = {"host": socket.gethostname(), "usable": usable(findings), "findings": findings, "facts": facts, "nodes": rows[0],
            "links": rows[1]}
    write_json(json, msgspec.json.encode(told).decode())
