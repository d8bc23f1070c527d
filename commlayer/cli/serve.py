"""`commlayer serve`: a coordinator, a summation server, or both, until the job is over. Knows neither codecs nor decisions."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import signal
import threading
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from commlayer.config import Config, host_port, join_host, read_config
from commlayer.errors import CommError
from commlayer.transport import secret
from commlayer.transport.secret import REMEDY

log = logging.getLogger("commlayer")

UNFIT_S = 10.0
"""With a plan that it cannot serve, a server stays for so long, or until the workers have left, to tell them as they dial."""


def serve(
    join: Annotated[str, typer.Option(help="host:port of a coordinator: serve sums only.", metavar="ADDR")] = "",
    bind: Annotated[str, typer.Option(help="Address of this machine to listen on, else 127.0.0.1.", metavar="HOST")] = "",
    token_file: Annotated[str, typer.Option(help="File with the job's secret, else COMMLAYER_TOKEN.", metavar="FILE")] = "",
    advertise: Annotated[str, typer.Option(help="Name or address under which others reach this machine.", metavar="HOST")] = "",
    port: Annotated[int, typer.Option(help="The coordinator's port, the data port is the next one; 0: any free ones.")] = 0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text on addresses other than loopback.")] = False,
    workers: Annotated[int, typer.Option(help="How many workers to wait for; 0: as many as the first one says.", min=0)] = 0,
    servers: Annotated[int | None, typer.Option(help="How many summation servers with this one, else 1.", min=0)] = None,
    no_server: Annotated[bool, typer.Option("--no-server", help="Coordinate only; --servers then counts the others.")] = False,
    number: Annotated[int, typer.Option(help="Which server of the plan this is; -1: the next one.", min=-1)] = -1,
    parent: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Host the coordinator of a job and a summation server; with --join only a server of that job."""
    given: dict[str, Any] = {"token_file": token_file, "join": join, "bind": bind, "advertise": advertise, "port": port,
                             "insecure": insecure}
    if parent:
        from commlayer.control import piping

        given["token"] = piping.hear().decode()
    config = read_config({name: value for name, value in given.items() if value})
    if config.join and no_server:
        raise ValueError(f"--no-server with --join {config.join} leaves nothing to do: drop one of them")
    if servers == 0 and not no_server:
        raise ValueError("--servers 0 does not count this one: add --no-server to coordinate only")
    if config.port == 65535 and not config.join and not no_server:
        raise ValueError("--port 65535 leaves no next port for the data: choose a lower one")
    logging.basicConfig(level=logging.WARNING if parent else logging.INFO, format="commlayer serve: %(message)s")
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    made = ""
    if not config.token and not parent:
        if config.join:
            raise ValueError(f"--join {config.join} asks for the job's secret: {REMEDY}")
        made = secret.new()
        config = msgspec.structs.replace(config, token=made)
    if servers is None:
        servers = 0 if no_server else 1
    _run(config, _Part(workers, servers, -1 if no_server else number, not no_server, parent), made, end)


class _Part(NamedTuple):
    """What this process is to do. `made`: the secret, if it was made here; `parent`: whose child it is, if it is embedded."""

    workers: int
    servers: int
    number: int
    sums: bool
    parent: int


def _run(config: Config, part: _Part, made: str, end: threading.Event) -> None:
    """Until `end` is set or the job is over. A line of JSON on standard output tells the addresses, and a secret made here."""
    from commlayer.control import client, messages
    from commlayer.control.coordinator import Coordinator
    from commlayer.control.embedded import follow_parent

    reason = [messages.FINISHED]
    with contextlib.ExitStack() as stack:
        control, near, data, data_port = config.join, config.join, "", config.port
        orphaned = functools.partial(_abandon, reason, part.parent)
        if not control:
            coordinator = Coordinator(config, workers=part.workers, servers=part.servers, ended=end)
            stack.callback(coordinator.close)
            control, near = coordinator.address, coordinator.near
            data_port = config.port and config.port + 1
            orphaned = functools.partial(coordinator.orphaned, part.parent)
        if part.parent:
            follow_parent(part.parent, end, orphaned)
        if part.sums:
            # Here, since it loads torch, which a coordinator does without.
            from commlayer.control.serving import Serving

            serving = Serving(config.bind, data_port, config)
            stack.callback(serving.close)
            data = join_host(config.advertise or config.bind, host_port(serving.address)[1])
        print(json.dumps({"control": control, "data": data} | ({"token": made} if made else {})), flush=True)
        token = f"COMMLAYER_TOKEN={made}" if made else "the job's secret"
        log.info("workers join with COMMLAYER_JOIN=%s and %s", control, token)
        if part.sums:
            request = messages.server(data, config.node, part.number, beside=not config.join)
            try:
                member = client.join(near, request, config, _note, deadline_s=math.inf, ended=end,
                                     on_silence=lambda silent_s: _alone(serving.alone, control, silent_s, end))
            except CommError:
                if end.is_set():
                    return
                raise
            stack.callback(lambda: member.leave(reason[0]))
            try:
                serving.start(member.view, member.plan, member.rank)
            except ValueError as error:
                end.wait(UNFIT_S)
                member.leave(str(error))
                raise
        end.wait()


def _abandon(reason: list[str], parent: int) -> None:
    """The trainer that started this server has ended: what the others hear."""
    reason[0] = f"its training process (pid {parent}) has ended"


def _alone(alone: bool, control: str, silent_s: float, end: threading.Event) -> None:
    """The coordinator does not answer. Without it nobody says that the job is over, so a server without workers ends."""
    if alone and not end.is_set():
        log.warning("coordinator %s: no answer for %.1f s, and no worker is connected: this server ends", control, silent_s)
        end.set()


def _note(error: CommError) -> None:
    """The workers act on a death; a server only says so."""
    log.warning("%s", error)
