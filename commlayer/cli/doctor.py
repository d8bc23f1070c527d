"""`commlayer doctor`: prints the findings of commlayer/doctor on this machine and writes them to a file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commlayer.config import Config, host_port, launcher_says, master, read_config, read_launch
from commlayer.errors import InvalidInput, RecordError

if TYPE_CHECKING:
    from commlayer.doctor.checks import Options
    from commlayer.doctor.report import Finding

PAGE = 80


def doctor(
    join: Annotated[str, typer.Option(help="host:port of the coordinator to join.", metavar="ADDR")] = "",
    master_: Annotated[str, typer.Option("--master", help="host:port of the rendezvous, else MASTER_ADDR.",
                                         metavar="ADDR")] = "",
    nodes: Annotated[int, typer.Option(help="Compare N nodes that run this command at the same time, and their links.",
                                       min=0)] = 0,
    plan: Annotated[Path | None, typer.Option(help="The plan file of the run.", metavar="FILE")] = None,
    save: Annotated[Path, typer.Option(help="The folder for checkpoints.", metavar="DIR")] = Path("."),
    bind: Annotated[str, typer.Option(help="Address to listen on.", metavar="HOST")] = "",
    port: Annotated[int, typer.Option(help="Port for a coordinator here; its data port is the next one.")] = 0,
    keys: Annotated[str, typer.Option(help="This node's keys folder, else COMMLAYER_KEYS.", metavar="DIR")] = "",
    journal: Annotated[str, typer.Option(help="The folder for the journal of a server here.", metavar="DIR")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text on addresses other than loopback.")] = False,
    no_bandwidth: Annotated[bool, typer.Option("--no-bandwidth", help="Skip measuring the link (2 s).")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write findings and values there.", metavar="FILE")] = None,
) -> None:
    """Check this machine, its network and the server before a run. Exit code 2 if a check fails."""
    from commlayer.cli.arguments import check_json, write_json

    check_json(json)
    settings = {"join": join, "bind": bind, "port": port, "keys": keys, "journal": journal, "insecure": insecure}
    options = _options({name: value for name, value in settings.items() if value}, master_, nodes, plan, save)
    # Imported late: checks load numpy, which --help does not need.
    import msgspec
    from rich.console import Console

    from commlayer.doctor import report
    from commlayer.doctor.checks import Doctor
    from commlayer.doctor.report import of_error, run_checks, usable

    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=PAGE)
    findings: list[Finding] = []

    def show(finding: Finding) -> None:
        findings.append(finding)
        report.show(console, finding)

    if options.problem:
        show(of_error("settings", options.problem))
    examination = Doctor(options)
    for checks in (examination.checks, lambda: [] if no_bandwidth else examination.link_check(),
                   lambda: [examination.node_check()] if nodes > 1 else []):
        for finding in run_checks(checks()):
            show(finding)
    if examination.pairs:
        from commlayer.doctor.nodes import table

        console.print("\n".join(table(examination.nodes, examination.pairs)))
    console.print(report.summary(findings))
    data = {"host": socket.gethostname(), "usable": usable(findings), "findings": findings, "nodes": examination.nodes,
            "links": examination.pairs}
    write_json(json, msgspec.json.encode(data).decode())
    if not usable(findings):
        raise typer.Exit(2)


def _options(given: dict[str, Any], where: str, nodes: int, plan: Path | None, save: Path) -> Options:
    from commlayer.doctor.checks import Options

    port = launcher_says("MASTER_PORT")
    try:
        address = host_port(where) if where else (master(), int(port) if port.isdecimal() else 0)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--master: {error}") from None
    launched = bool(address[1]) and read_launch().world > 1 and not where
    problem = ""
    try:
        config = read_config(given)
    except RecordError as error:
        problem, config = str(error), _without_checks(given)
    return Options(config, problem, address, launched, nodes, plan, save)


def _without_checks(given: dict[str, Any]) -> Config:
    """The settings that are valid, so that one wrong setting does not hide other problems."""
    for left_out in ({"keys"}, {"keys", "join", "bind"}, set(given)):
        try:
            return read_config({name: value for name, value in given.items() if name not in left_out} | {"insecure": True},
                               environ={"COMMLAYER_CONFIG": ""})
        except RecordError:
            continue
    return Config()
