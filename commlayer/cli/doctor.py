"""`commlayer doctor`: prints the findings of commlayer/doctor on this machine and writes them to a file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.cli.options import Bind, Insecure, Join, Journal, Json, Keys, Port, split_bind, stored_keys
from commlayer.config import Config, read_config
from commlayer.errors import RecordError

if TYPE_CHECKING:
    from commlayer.doctor.report import Finding

PAGE = 80


def doctor(
    join: Join = "", bind: Bind = "", port: Port = 0, keys: Keys = "", insecure: Insecure = False, journal: Journal = "",
    plan: Annotated[Path | None, typer.Option(help="The plan file of the run.", metavar="FILE")] = None,
    json: Json = None,
) -> None:
    """Check this machine, its network and the server before a run. Exit code 2 if a check fails.

    Under torchrun or srun it also compares all nodes, and measures the links between them.
    """
    from commlayer.cli.arguments import check_json, write_json

    check_json(json)
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

    bind, port = split_bind(bind, port)
    join, keys = stored_keys(join, keys, insecure=insecure)
    settings = {"join": join, "bind": bind, "port": port, "keys": keys, "journal": journal, "insecure": insecure}
    try:
        config = read_config({name: value for name, value in settings.items() if value})
    except RecordError as error:
        show(of_error("settings", error))
        config = Config(port=port, journal=journal, insecure=True)  # so one wrong setting does not hide other problems
    examination = Doctor(config, plan)
    for checks in (examination.checks, examination.link_check, examination.node_check):
        for finding in run_checks(checks()):
            show(finding)
    if examination.links:
        from commlayer.doctor.nodes import table

        console.print("\n".join(table(examination.nodes, examination.links)))
    console.print(report.summary(findings))
    data = {"host": socket.gethostname(), "usable": usable(findings), "findings": findings, "nodes": examination.nodes,
            "links": examination.links}
    write_json(json, msgspec.json.encode(data).decode())
    if not usable(findings):
        raise typer.Exit(2)
