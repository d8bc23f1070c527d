"""Options that several commands share, with the same name, meaning and help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from commlayer.cli.output import check_json
from commlayer.cluster.keys import home_keys
from commlayer.config import Config, read_config, split_port
from commlayer.errors import InvalidInput, RecordError
from commlayer.transport.keys.secret import REMEDY

Json = Annotated[Path | None, typer.Option(
    "--json", callback=check_json, help="Also write the result to this file.", metavar="FILE")]
Out = Annotated[Path, typer.Option(help="Write the result there.", metavar="FILE")]
Batch = Annotated[int | None, typer.Option(help="Samples per worker; default: the model's usual batch.", metavar="N", min=1)]
NoiseScale = Annotated[float | None, typer.Option(
    help="Gradient noise scale in samples; default: as published for such models.", metavar="N")]
Codecs = Annotated[list[str] | None, typer.Option("--codec", help="Allow only this codec; may be repeated.", metavar="CODEC")]
Join = Annotated[str, typer.Option(help="host:port of a job's coordinator; default: COMMLAYER_JOIN.", metavar="ADDR")]
Bind = Annotated[str, typer.Option(help="Address to listen on, or HOST:PORT; default 127.0.0.1.", metavar="HOST")]
Port = Annotated[int, typer.Option(help="The coordinator's port; data uses the next one. 0: any free ports.")]
Keys = Annotated[str, typer.Option(help="This node's folder of keys; default: COMMLAYER_KEYS.", metavar="DIR")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow unencrypted connections to other machines.")]
Journal = Annotated[str, typer.Option(help="Folder for the server's journal, to resume after a crash.", metavar="DIR")]


Folder = Annotated[Path, typer.Option("--dir", help="The CA's folder; keep it on one machine.", metavar="DIR")]


def config_from_options(**options: Any) -> Config:
    """The settings of the options that the user set; the others come from the environment, a file or the defaults."""
    return read_config({name: value for name, value in options.items() if value})


def config_with_secret(what: str, **options: Any) -> Config:
    """The settings for a connection to a job, which needs the job's secret. `what`: what the command does, for the error."""
    config = config_from_options(**options)
    if not config.token:
        raise InvalidInput("E-SECRET", f"{what} {config.join} needs the job's secret: {REMEDY}")
    return config


def stored_keys(address: str, keys: str, *, insecure: bool) -> tuple[str, str]:
    """Returns the address and the folder of keys that a home's line names. A plain HOST:PORT uses the keys of the only home
    that has fetched keys there, unless other keys, a secret, or insecure are set."""
    if not home_keys.is_invitation(address):
        homes = [home for home in home_keys.stored_lines() if home.address == address]
        if len(homes) != 1 or keys or insecure or _has_access(address):
            return address, keys
        return address, str(homes[0].folder)
    home = parse_line(address, keys)
    if (folder := home.stored()) is None:
        raise InvalidInput("E-INVITATION", f"{home.name} has no keys in {home.folder}: `commlayer join` with the whole line, "
                                           "whose token follows '#', fetches them")
    return home.address, str(folder)


def fetched_keys(home: home_keys.HomeLine, say: Callable[[str], None], wait_s: float | None = None) -> Path:
    """Returns the folder with this home's keys. If there is none yet, fetches a certificate with the line's token. `wait_s`:
    seconds to wait for the server; None: the setting join_deadline_s."""
    if (folder := home.stored()) is not None:
        return folder
    if home.token is None:
        raise InvalidInput("E-INVITATION", f"{home.name} has no keys in {home.folder}, and the line has no token after '#': "
                                           f"{home_keys.COPY}")
    from commlayer.cluster.keys.enrolment_client import enrol  # imported late: it loads cryptography

    folder = enrol(home, wait_s or read_config({"join": home.address, "insecure": True}).join_deadline_s, say)
    say(f"fetched a certificate for {home.name}; its keys are in {folder}, and later runs need no token")
    return folder


def _has_access(address: str) -> bool:
    """Returns whether environment and file set what a connection to `address` needs."""
    try:
        config = read_config({"join": address})
    except RecordError as error:
        return error.code != "E-PLAIN-TEXT"
    return bool(config.token or config.insecure)


def parse_line(address: str, keys: str) -> home_keys.HomeLine:
    home = home_keys.parse(address)
    if keys:
        raise InvalidInput("E-CLI-OPTION", f"--keys {keys} and the home's name {home.name} in the address: remove one of them")
    return home


def split_bind(bind: str, port: int) -> tuple[str, int]:
    """Splits --bind into host and port, if it contains a port."""
    host, own = split_port(bind, "--bind")
    if port and own not in (0, port):
        raise InvalidInput("E-CLI-OPTION", f"--bind {bind} and --port {port} differ: give the port in one of them")
    return host, own or port
