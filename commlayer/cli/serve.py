"""`commlayer serve`: runs the coordinator and a summation server (servers/server_process.py)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from commlayer.cli.options import Bind, Insecure, Join, Journal, Keys, Port, split_bind
from commlayer.config import Config, host_port, read_config
from commlayer.errors import InvalidInput, RecordError
from commlayer.transport.keys import secret
from commlayer.transport.keys.secret import REMEDY

if TYPE_CHECKING:
    from commlayer.observe.event_log import EventLog


def serve(
    join: Join = "", bind: Bind = "", port: Port = 0, keys: Keys = "", insecure: Insecure = False, journal: Journal = "",
    advertise: Annotated[str, typer.Option(help="Name or address that others use for this machine; with a tunnel's port, "
                                                "they need no other one.", metavar="HOST[:PORT]")] = "",
    workers: Annotated[int, typer.Option(help="Number of workers, all required; with --min-workers, the largest number, by "
                                              "default 64. 0: the first worker's number.", min=0)] = 0,
    servers: Annotated[int | None, typer.Option(help="Number of servers with this one; default 1.", metavar="N", min=0)] = None,
    no_server: Annotated[bool, typer.Option("--no-server", help="Coordinate only; --servers counts only others.")] = False,
    min_workers: Annotated[int, typer.Option(help="Begin and continue with at least this many workers; others may join and "
                                                  "leave. 0: all are required.", min=0)] = 0,
    number: Annotated[int, typer.Option(help="This server's number in the plan; -1: the next free one.", min=-1)] = -1,
    page: Annotated[str, typer.Option(help="Serve a page about the job, and metrics for Prometheus, there; a port alone is on "
                                           "127.0.0.1.", metavar="[HOST:]PORT")] = "",
    events: Annotated[str, typer.Option(help="Folder for the job's events, for `commlayer top`.", metavar="DIR")] = "",
    alert: Annotated[list[str] | None, typer.Option(
        help="Where to send alerts: a home is missing, the loss is not finite, the run is over. ntfy://TOPIC, a webhook "
             "(https://...), mailto:ADDRESS, or a command; may be repeated.", metavar="WHERE")] = None,
    watts: Annotated[float, typer.Option(help="Power of one machine while it trains; default: of its GPUs, as nvidia-smi "
                                              "reports it.", metavar="W", min=0.0)] = 0.0,
    kwh_price: Annotated[float, typer.Option(help="Price of a kWh, for the price of the run.", metavar="PRICE", min=0.0)] = 0.0,
    invite: Annotated[str, typer.Option(help="Names of homes to invite, with commas; default: home-1 to home-N, for N workers, "
                                             "or for N least workers.", metavar="NAMES")] = "",
    folder: Annotated[Path, typer.Option("--dir", help="The CA's folder for invitations, created if missing.",
                                         metavar="DIR")] = Path("keys"),
) -> None:
    """Run a job's coordinator and a summation server; with --join, run only a server of an existing job.

    If the server listens on another address than loopback and has no keys, it creates a CA and prints one line to paste at each
    home.
    """
    bind, port = split_bind(bind, port)
    options: dict[str, Any] = {"join": join, "bind": bind, "advertise": advertise, "port": port, "insecure": insecure,
                               "keys": keys, "journal": journal, "min_workers": min_workers, "events": events}
    settings = {name: value for name, value in options.items() if value}
    least = min_workers or read_config({"bind": "127.0.0.1", "insecure": True}).min_workers  # the environment may set it
    names = _home_names(invite, workers or least)
    workers = workers or (0 if least else len(names))
    config, invites = read_settings(settings, names, wanted=bool(invite))
    if config.join and no_server:
        raise InvalidInput("E-CLI-OPTION", f"--no-server with --join {config.join} leaves nothing to run: remove one of them")
    of_coordinator = {"--events": events, "--page": page, "--alert": alert, "--watts": watts, "--kwh-price": kwh_price}
    if config.join and (given := [name for name, value in of_coordinator.items() if value]):
        raise InvalidInput("E-CLI-OPTION", f"{given[0]} with --join {config.join}: only the "
                                           "coordinator has a job's events; give it to the server that was started without "
                                           "--join")
    if servers == 0 and not no_server:
        raise InvalidInput("E-CLI-OPTION", "--servers 0 does not count this one: add --no-server to coordinate only")
    if config.join and not config.token:
        raise InvalidInput("E-SECRET", f"--join {config.join} needs the job's secret: {REMEDY}")
    # Imported late: it loads grpc, which --help does not need.
    from commlayer.cluster.servers import server_process

    part = server_process.ServeOptions(workers, (0 if no_server else 1) if servers is None else servers,
                                       -1 if no_server else number, not no_server, page=parse_page_address(page))
    if not config.join:
        file = _costs_file(config, str(folder) if invites else config.keys)
        part = part._replace(watch=_watch(alert or [], file, watts, kwh_price))
    if invites:
        config = read_config(settings | {"keys": str(_keys_of_server(folder, names))})
        part = part._replace(ca=str(folder.absolute()), invited=tuple(names))
    elif not config.token:
        part = part._replace(job_token=secret.new_secret())
        config = msgspec.structs.replace(config, token=part.job_token)
    server_process.run(config, part)


def _costs_file(config: Config, keys: str) -> Path | None:
    """The file in which this server counts costs, in the folder of the setting `cache`; None if that is empty. Servers of one
    user have different folders of keys or different ports."""
    from commlayer import last_run  # imported late: it loads the planner's records

    server = f"{Path(keys).absolute() if keys else ''} {config.port}"
    kept = last_run.folder(config.cache)
    return kept and kept / "costs" / f"{hashlib.sha256(server.encode()).hexdigest()[:16]}.json"


def _watch(places: list[str], file: Path | None, watts: float, kwh_price: float) -> Callable[[EventLog], Callable[[], None]]:
    """Reads the options about alerts and costs. Returns what starts to follow the job's events."""
    from commlayer.observe.job.alerts import Alerts, parse_receiver
    from commlayer.observe.job.costs import Costs
    from commlayer.observe.job.watcher import Watcher

    receivers = [parse_receiver(place) for place in places]
    costs = Costs(file, watts=watts, kwh_price=kwh_price)
    return lambda events: Watcher(events, costs, Alerts(receivers)).close


def _home_names(invite: str, workers: int) -> list[str]:
    """Returns the names of the homes that may be invited."""
    names = list(dict.fromkeys(name.strip() for name in invite.split(","))) if invite else []
    return names or [f"home-{number}" for number in range(1, workers + 1)]


def read_settings(settings: dict[str, Any], names: list[str], *, wanted: bool) -> tuple[Config, bool]:
    """Reads the settings. Returns also whether homes are to be invited: if `wanted`, or if the server listens on another
    address than loopback without keys. Creates nothing."""
    try:
        config = read_config(settings)
    except RecordError as error:
        if error.code != "E-PLAIN-TEXT" or settings.get("join"):
            raise
        if not names:
            raise RecordError("E-PLAIN-TEXT", f"{error.what}; or give --workers N or --min-workers N, to invite N homes: they "
                                              "fetch keys with the lines that this command then prints") from None
        config = read_config(settings | {"insecure": True})  # reports other mistakes
        if config.join:
            raise
        return config, True
    given = next((name for name in ("join", "keys") if getattr(config, name)), "")  # insecure is for --page on this server
    if wanted and given:
        raise InvalidInput("E-CLI-OPTION", f"--invite needs the CA's own keys (--dir), but {given} is set: remove one of them")
    return config, wanted


def _keys_of_server(folder: Path, names: list[str]) -> Path:
    """Returns the folder of this server's keys. Creates the CA and the keys if they are missing, after it has checked the names
    of homes to invite."""
    from commlayer.cluster.keys import invitations  # imported late: it loads cryptography

    for name in names:
        invitations.check_name(name)
    place, new = invitations.server_keys(folder)
    if new:
        print(f"commlayer serve: created a CA in {folder}, which can admit any machine to the job; keep it on this machine",
              file=sys.stderr, flush=True)
    return place


def parse_page_address(text: str) -> tuple[str, int] | None:
    """The host and port of --page. Returns None if the user did not give the option."""
    if not text:
        return None
    try:
        return ("127.0.0.1", int(text)) if text.isdecimal() and int(text) < 65536 else host_port(text)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--page: {error}") from None
