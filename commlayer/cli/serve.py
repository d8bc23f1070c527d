"""`commlayer serve`: runs the coordinator and a summation server (cluster/server_process.py)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from commlayer.cli.options import Bind, Insecure, Join, Journal, Keys, Port, split_bind
from commlayer.config import host_port, read_config
from commlayer.errors import InvalidInput
from commlayer.transport import secret
from commlayer.transport.secret import REMEDY


def serve(
    join: Join = "", bind: Bind = "", port: Port = 0, keys: Keys = "", insecure: Insecure = False, journal: Journal = "",
    advertise: Annotated[str, typer.Option(help="Name or address that others use for this machine.", metavar="HOST")] = "",
    workers: Annotated[int, typer.Option(help="Number of workers; 0: the number that the first worker reports.", min=0)] = 0,
    servers: Annotated[int | None, typer.Option(help="Number of servers with this one; default 1.", metavar="N", min=0)] = None,
    no_server: Annotated[bool, typer.Option("--no-server", help="Coordinate only; --servers counts only others.")] = False,
    min_workers: Annotated[int, typer.Option(help="Continue with at least this many workers; 0: none may leave.", min=0)] = 0,
    number: Annotated[int, typer.Option(help="This server's number in the plan; -1: the next free one.", min=-1)] = -1,
    metrics: Annotated[str, typer.Option(help="Serve metrics for Prometheus there; a port alone is on 127.0.0.1.",
                                         metavar="HOST:PORT")] = "",
    events: Annotated[str, typer.Option(help="Folder for the job's events, for `commlayer top`.", metavar="DIR")] = "",
) -> None:
    """Run a job's coordinator and a summation server; with --join, run only a server of an existing job."""
    bind, port = split_bind(bind, port)
    options: dict[str, Any] = {"join": join, "bind": bind, "advertise": advertise, "port": port, "insecure": insecure,
                               "keys": keys, "journal": journal, "min_workers": min_workers, "events": events}
    config = read_config({name: value for name, value in options.items() if value})
    if config.join and no_server:
        raise InvalidInput("E-CLI-OPTION", f"--no-server with --join {config.join} leaves nothing to run: remove one of them")
    if config.join and (events or metrics):
        raise InvalidInput("E-CLI-OPTION", f"{'--events' if events else '--metrics'} with --join {config.join}: only the "
                                           "coordinator has a job's events; give it to the server that was started without "
                                           "--join")
    if servers == 0 and not no_server:
        raise InvalidInput("E-CLI-OPTION", "--servers 0 does not count this one: add --no-server to coordinate only")
    fresh = ""
    if not config.token:
        if config.join:
            raise InvalidInput("E-SECRET", f"--join {config.join} needs the job's secret: {REMEDY}")
        fresh = secret.new_secret()
        config = msgspec.structs.replace(config, token=fresh)
    if servers is None:
        servers = 0 if no_server else 1
    # Imported late: it loads grpc, which --help does not need.
    from commlayer.cluster import server_process

    server_process.run(config, server_process.ServeOptions(workers, servers, -1 if no_server else number, not no_server,
                                                           job_token=fresh, metrics=_address_of(metrics)))


def _address_of(text: str) -> tuple[str, int] | None:
    """The host and port of --metrics; None if it is not given."""
    if not text:
        return None
    try:
        return ("127.0.0.1", int(text)) if text.isdecimal() and int(text) < 65536 else host_port(text)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--metrics: {error}") from None
