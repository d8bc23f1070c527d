"""`commlayer doctor`: prints the findings of commlayer/doctor on this machine and writes them to a file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commlayer.config import Config, host_port, launcher_says, master, read_config, read_launch
from commlayer.errors import InvalidInput, RecordError

if TYPE_CHECKING:
    from commlayer.doctor.finding import Finding
    from commlayer.doctor.looks import Asked, Seen

PAGE = 80


def doctor(
    join: Annotated[str, typer.Option(help="host:port of the coordinator that the run is to join.", metavar="ADDR")] = "",
    master_: Annotated[str, typer.Option("--master", help="host:port where ranks of a cluster meet, else MASTER_ADDR.",
                                         metavar="ADDR")] = "",
    nodes: Annotated[int, typer.Option(help="How many nodes look at once, each with the same line: compares them and links.",
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
    options = _asked({name: value for name, value in given.items() if value}, master_, nodes, plan, save)
    # Imported late: checks load numpy, which --help does not need.
    from rich.console import Console

    from commlayer.doctor import screen
    from commlayer.doctor.examination import examine
    from commlayer.doctor.finding import of_error, usable
    from commlayer.doctor.looks import Seen, between, link, looks

    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=PAGE)
    findings: list[Finding] = []

    def show(found: Finding) -> None:
        findings.append(found)
        screen.show(console, found)

    if options.problem:
        show(of_error("settings", options.problem))
    seen = Seen()
    for finding in examine([*looks(options, seen)]):
        show(finding)
    if not no_bandwidth and (last := link(options, seen)) is not None:
        for finding in examine([last]):
            show(finding)
    if nodes > 1:
        for finding in examine([between(options, seen)]):
            show(finding)
        if seen.pairs:
            console.print("\n".join(screen.table(seen.nodes, seen.pairs)))
    console.print(screen.summary(findings))
    _write(json, findings, seen)
    if not usable(findings):
        raise typer.Exit(2)


def _asked(given: dict[str, Any], where: str, nodes: int, plan: Path | None, save: Path) -> Asked:
    from commlayer.doctor.looks import Asked

    port = launcher_says("MASTER_PORT")
    try:
        meet = host_port(where) if where else (master(), int(port) if port.isdecimal() else 0)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--master: {error}") from None
    launched = bool(meet[1]) and read_launch().world > 1 and not where
    problem = ""
    try:
        config = read_config(given)
    except RecordError as error:
        problem, config = str(error), _without_checks(given)
    return Asked(config, problem, meet, launched, nodes, plan, save)


def _without_checks(given: dict[str, Any]) -> Config:
    """The settings that are valid, so that one wrong setting does not hide other problems."""
    for left_out in ({"keys"}, {"keys", "join", "bind"}, set(given)):
        try:
            return read_config({name: value for name, value in given.items() if name not in left_out} | {"insecure": True},
                               environ={"COMMLAYER_CONFIG": ""})
        except RecordError:
            continue
    return Config()


def _write(json: Path | None, findings: list[Finding], seen: Seen) -> None:
    import msgspec

    from commlayer.cli.plan_inputs import write_json
    from commlayer.doctor.finding import usable

    data = {"host": socket.gethostname(), "usable": usable(findings), "findings": findings, "facts": seen.facts,
            "nodes": seen.nodes, "links": seen.pairs}
    write_json(json, msgspec.json.encode(data).decode())
