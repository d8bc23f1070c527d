"""`commlayer doctor`: prints the findings of commlayer/doctor on this machine and writes them to a file."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer import last_run
from commlayer.cli.options import (
    Bind,
    Insecure,
    Join,
    Journal,
    Json,
    Keys,
    Port,
    config_from_options,
    fetched_keys,
    parse_line,
    split_bind,
    stored_keys,
)
from commlayer.cli.output import Table, show, write_json
from commlayer.cluster.keys import home_keys
from commlayer.config import Config
from commlayer.doctor.findings import Finding, failure_from_error, run_checks, summary, usable
from commlayer.errors import Coded, RecordError

if TYPE_CHECKING:
    from commlayer.doctor.nodes import Link

ENROL_S = 10.0
"""Seconds to wait for a server that does not answer while a home fetches its certificate."""


def doctor(
    join: Join = "", bind: Bind = "", port: Port = 0, keys: Keys = "", insecure: Insecure = False, journal: Journal = "",
    plan: Annotated[Path | None, typer.Option(help="The plan file of the run.", metavar="FILE")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what this machine remembers of earlier runs.")] = False,
    json: Json = None,
) -> None:
    """Check this machine, its network and the server before a run. Exit code 2 if a check fails.

    Under torchrun or srun it also compares all nodes, and measures the links between them. With a home's line,
    `--join NAME@HOST:PORT#TOKEN`, it first fetches the home's certificate.
    """
    if forget:
        last_run.forget(last_run.folder(config_from_options().cache))
    examine(join, bind, port, keys=keys, insecure=insecure, journal=journal, plan=plan, json=json)


def examine(
    join: str = "", bind: str = "", port: int = 0, *, keys: str = "", insecure: bool = False, journal: str = "",
    plan: Path | None = None, script: Path | None = None, json: Path | None = None,
) -> None:
    """Runs all checks for these settings, and prints the findings and the verdict. Raises typer.Exit(2) if a check fails.
    `script`: the training script of a home, which is only compiled."""
    # Imported late: checks load numpy, which --help does not need.
    from commlayer.doctor.checks import Doctor

    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        show(finding)

    bind, port = split_bind(bind, port)
    home = parse_line(join, keys) if home_keys.is_invitation(join) else None
    enrolled = True
    if home is None:
        join, keys = stored_keys(join, keys, insecure=insecure)
    else:
        join = home.address
        try:
            keys = str(fetched_keys(home, lambda line: print(f"commlayer: {line}", file=sys.stderr, flush=True), ENROL_S))
        except Coded as error:
            if home.token is None:
                raise
            report(failure_from_error("keys", error))
            enrolled, insecure = False, True  # the checks that need no keys are still useful
    try:
        config = config_from_options(join=join, bind=bind, port=port, keys=keys, journal=journal, insecure=insecure)
    except RecordError as error:
        report(failure_from_error("settings", error))
        config = Config(port=port, journal=journal, insecure=True)  # so one wrong setting does not hide other problems
    examination = Doctor(config, plan, script, enrolled=enrolled)
    for checks in examination.phases():
        for finding in run_checks(checks, examination):
            report(finding)
    if examination.links:
        show(_rates([node.host for node in examination.nodes], examination.links))
    show(summary(findings))
    if home is not None and usable(findings):
        print(f"next: commlayer join {home._replace(token=None)} {script or 'SCRIPT'}")
    data = {"host": socket.gethostname(), "usable": usable(findings), "findings": findings, "nodes": examination.nodes,
            "links": examination.links}
    write_json(json, data)
    if not usable(findings):
        raise typer.Exit(2)


def _rates(hosts: Sequence[str], links: Sequence[Sequence[Link]]) -> Table:
    """Rates from the node of each row to the node of each column."""
    rows = [["" if a == b else "-" if isinstance(link, str) else f"{link / 1e6:.0f}" if link >= 1e8 else f"{link / 1e6:.3g}"
             for b, link in enumerate(row)] for a, row in enumerate(links)]
    return Table("", ("Mb/s from, to", *(f">{number}" for number in range(len(hosts)))),
                 [[f"{number} {host}", *row] for number, (host, row) in enumerate(zip(hosts, rows, strict=True))])
