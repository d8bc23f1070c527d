"""`commlayer keys`: creates and revokes a job's keys and certificates, and prints the next step after each command."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from commlayer.cli.options import Folder
from commlayer.config import host_port
from commlayer.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Keys of a job on several machines: a CA, and a certificate for each node.")
Name = Annotated[str, typer.Argument(help="The node's name in errors and logs.", metavar="NAME")]
SOON_DAYS = 30
# authority.py is imported late: it loads cryptography, which --help does not need.


@app.command()
def init(
    folder: Folder = Path("keys"),
    days: Annotated[int, typer.Option(help="Days until the CA expires.")] = 3650,
) -> None:
    """Create a job's CA (certificate authority). The CA's folder can admit any machine to the job: keep this folder on one
    machine."""
    from commlayer.cluster.keys import authority

    until = authority.init(folder, days)
    print(f"created a CA in {folder}, valid until {until:%Y-%m-%d}; keep that folder on this machine")
    print(f"next: commlayer keys add NAME{_dir(folder)}, once for each node")


@app.command()
def add(
    name: Name, folder: Folder = Path("keys"),
    days: Annotated[int, typer.Option(help="Days until the certificate expires.")] = 365,
    dials_only: Annotated[bool, typer.Option("--dials-only", help="Never a server or the coordinator.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Create a new certificate and revoke the old one.")] = False,
) -> None:
    """Create a node's certificate, in a folder to copy to the node."""
    from commlayer.cluster.keys import authority

    place = authority.add(folder, name, days, dials_only=dials_only, again=again)
    until = authority.valid(folder, name)[0].until
    print(f"created keys of {name} in {place}, valid until {until:%Y-%m-%d}")
    if dials_only:  # scp cannot connect to a machine behind NAT
        print(f"send that folder to {name} over a channel that you trust: tar -czf {name}.tgz -C {place.parent} {name}; "
              "every holder can join the job")
        print(f"on {name}: tar -xzf {name}.tgz, then commlayer join --keys {name} ..., or COMMLAYER_KEYS={name}")
    else:
        print(f"copy them to {name}: scp -rp {place} {name}:commlayer-keys; then set COMMLAYER_KEYS=commlayer-keys on {name}")
    if again:
        _say_list(folder)


@app.command()
def invite(
    name: Name, folder: Folder = Path("keys"),
    address: Annotated[str, typer.Option(help="host:port of the server; default: where it last ran.", metavar="ADDR")] = "",
    hours: Annotated[float, typer.Option(help="Hours until the invitation expires.")] = 24.0,
    again: Annotated[bool, typer.Option("--again", help="Replace and revoke the home's present certificate.")] = False,
) -> None:
    """Print a line with which one home fetches a certificate of its own. `commlayer serve` must use this CA's folder."""
    from commlayer.cluster.keys import invitations

    address = address or invitations.read_book(folder).address
    if not address:
        raise InvalidInput("E-CLI-OPTION", "no server has run with this CA yet: give --address HOST:PORT")
    host_port(address)
    tokens = invitations.invite(folder, [name], hours, again=again)
    print(f"paste this line at {name} within {hours:g} hours, with your script instead of {invitations.SCRIPT}; it works once:")
    print(f"  {invitations.commands(folder, [name], tokens, address)[0]}")


@app.command()
def revoke(name: Name, folder: Folder = Path("keys")) -> None:
    """Revoke a node's certificates, and its invitation. A running job drops the node."""
    from commlayer.cluster.keys import authority, invitations

    withdrawn = invitations.withdraw(folder, name)  # first, so that no certificate follows
    if withdrawn and all(one.name != name for one in authority.list_issued(folder)):
        print(f"withdrew the invitation of {name}, which has no certificate")
        return
    count = authority.revoke(folder, name)
    print(f"revoked {count} certificate{'' if count == 1 else 's'} of {name}" if count else f"{name} was already revoked")
    _say_list(folder)


@app.command("list")
def list_(folder: Folder = Path("keys")) -> None:
    """List certificates and their dates."""
    from commlayer.cluster.keys import authority, invitations

    if not (folder / authority.CA_KEY).exists():
        raise InvalidInput("E-KEYS", f"{folder} has no CA: `commlayer keys init` creates one, --dir selects another folder")
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=SOON_DAYS)
    for one in authority.list_issued(folder):
        state = "revoked" if one.revoked else "ends soon" if one.until < soon else "good"
        print(f"{one.name:20} until {one.until:%Y-%m-%d}  {state}{', dials only' if one.dials_only else ''}")
    for name, until in invitations.pending(folder).items():
        print(f"{name:20} until {datetime.datetime.fromtimestamp(until):%Y-%m-%d %H:%M}  invited")


def _say_list(folder: Path) -> None:
    print(f"copy {folder / 'crl.pem'} into the keys folder of every machine of the job; a running job sees it within 2 s")


def _dir(folder: Path) -> str:
    return "" if folder == Path("keys") else f" --dir {folder}"
