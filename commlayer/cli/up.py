"""`commlayer up`: looks at this machine's keys and at the server, and joins, or says what to do next."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from commlayer.cli.join import join
from commlayer.cluster.keys import home_keys
from commlayer.cluster.keys.home_keys import HomeLine
from commlayer.config import read_config
from commlayer.errors import CommError, InvalidInput, RecordError, without_code


class Facts(NamedTuple):
    """What there is. The fields from `problem` on belong to the server of the only home."""

    homes: Sequence[HomeLine]
    """The homes whose keys this user has."""
    has_ca: bool
    """Whether the job's CA is in the current folder."""
    script: str
    problem: str = ""
    """Why the server did not answer; "" if it did."""
    begun: bool = False
    workers: int = 0
    free_seats: int = 0


def next_step(facts: Facts) -> str:
    """Returns what the user should do next; "" if this home should join now."""
    if not facts.homes and facts.has_ca:
        return "this folder has the job's CA, so this machine is its server: run `commlayer serve --bind HOST:PORT --workers N`"
    if not facts.homes:
        return ("this machine has no keys yet. Paste the line that the server's owner sends you: commlayer join "
                "NAME@HOST:PORT#TOKEN SCRIPT. If there is no server yet: commlayer serve --bind HOST:PORT --workers N")
    if len(facts.homes) > 1:
        lines = " or ".join(f"commlayer join {home} {facts.script or 'SCRIPT'}" for home in facts.homes)
        return f"this machine has keys of {len(facts.homes)} homes; run {lines}"
    home = facts.homes[0]
    if facts.problem:
        return (f"the server at {home.address} cannot be used ({facts.problem}). Its owner runs `commlayer serve`; "
                f"`commlayer doctor --join {home}` checks this machine")
    if facts.begun and not facts.free_seats:
        return f"the job is training with all its {facts.workers} workers; watch it with `commlayer top {home}`"
    if not facts.script:
        return f"{home.name} can join {home.address}: run `commlayer up SCRIPT`"
    return ""


def up(
    script: Annotated[Path | None, typer.Argument(help="The training script.", metavar="[SCRIPT]", show_default=False)] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", metavar="ARGS")] = None,
) -> None:
    """Join with the keys of this machine's home, or say what to do next. Exit code 2 if a script was not started."""
    facts = look(str(script or ""))
    if line := next_step(facts):
        print(f"commlayer up: {line}")
        raise typer.Exit(2 if script else 0)
    assert script is not None
    join(str(facts.homes[0]), script, args)


def look(script: str) -> Facts:
    """Collects the facts. Asks the server only if there is one home."""
    facts = Facts(home_keys.stored_lines(), (Path("keys") / "ca.key").exists(), script)
    if len(facts.homes) != 1:
        return facts
    # Imported late: these load grpc, which --help does not need.
    from commlayer.cluster.calls.messages import StatusReply, StatusRequest
    from commlayer.doctor import server

    (home,) = facts.homes
    try:
        with contextlib.closing(server.open_channel(read_config({"join": home.address, "keys": str(home.folder)}))) as channel:
            status = channel.call("Status", StatusRequest(), StatusReply, server.CALL_S)
    except (CommError, RecordError, InvalidInput) as error:
        return facts._replace(problem=without_code(error))
    return facts._replace(begun=status.begun, workers=status.workers, free_seats=status.free_seats)
