"""The process that serves a job: a coordinator, a summation server, or both, until the job is over.

`commlayer serve` runs it, and child_processes.py starts it as a child of a training process. attach() waits until the process
has printed its addresses. To start fast, it does not import torch or a command-line library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import math
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.coordinator_journal import CoordinatorJournal
from commlayer.cluster.membership.job_events import log_of_job
from commlayer.cluster.processes import child_processes
from commlayer.config import Config, host_port, is_loopback, reachable_address, read_config, reconnect_window_s, split_port
from commlayer.errors import MAX_PEER_TEXT_CHARS, Coded, CommError, InvalidInput, error_line, short_line, without_code
from commlayer.observe.event_files import EventFile
from commlayer.observe.event_log import EventLog
from commlayer.observe.log_lines import LogLines
from commlayer.transport.keys.key_folder import Keys

if TYPE_CHECKING:
    from commlayer.cluster.servers.data_server import DataServer

log = logging.getLogger("commlayer")

MAX_FILES = 8192
"""Open files that a server allows itself, if the system does: 1536 for MAX_CONNECTIONS control connections, 256 handshakes on
each of three ports, and those of data connections and journals. The usual limit is 1024."""
REFUSE_S = 10.0
"""Seconds for which a server that cannot serve its plan keeps running in order to refuse workers with the reason, unless they
leave earlier."""

SHUTDOWN_S = 60.0
"""Seconds allowed for shutdown after SIGTERM, in addition to dead_after_s. After that the process prints its stacks and
exits."""
FINAL_FLUSH_S = 0.5
"""Seconds allowed for sending queued data at the end of a job. A worker that is still connected then is dead, so waiting longer
is useless."""


class ServeOptions(NamedTuple):
    """What this process serves. `workers`: see Coordinator.__init__. `number`: the server's number in the plan; -1: the
    coordinator chooses. `sums`: True: run a summation server.

    `parent`: process id of the training process that started this process; 0 if none did. `job_token`: the secret, if this
    process generated it. `restarted`: True: this process has served an earlier job. `data_port`: ANY means the port after the
    coordinator's.
    """

    workers: int = 0
    servers: int = 1
    number: int = -1
    sums: bool = True
    parent: int = 0
    job_token: str = ""
    restarted: bool = False
    data_port: int = messages.ANY
    page: tuple[str, int] | None = None
    """Host and port of the web page and of metrics for Prometheus; None: there are none."""
    watch: Callable[[EventLog], Callable[[], None]] | None = None
    """Starts to follow the job's events, and returns what ends that."""
    ca: str = ""
    """Folder of the job's CA, if this process accepts invitations; `invited` belongs to it."""
    invited: tuple[str, ...] = ()
    """Names of the homes that should join."""


def run(config: Config, part: ServeOptions) -> None:
    """Serves until a job has ended in order, or until SIGTERM. Prints one line of JSON: the addresses, and the secret if this
    process generated it.

    After a failed job, the process serves the next job at the same address, unless it is embedded in a training process. With a
    journal, a process that is stopped before the job's end does not leave the job, and the same command resumes it.
    """
    if config.port == 65535 and not config.join and part.sums:
        raise InvalidInput("E-SETTING", "--port 65535: the data port is the next one, so the largest allowed value is 65534")
    if config.keys and (keys := Keys(config.keys)).own.dials_only:
        raise InvalidInput("E-KEYS",
                           f"keys: {keys.own.name} in {config.keys} was made with --dials-only, so it cannot be used by a "
                           f"server: use the folder of another node, or replace it with `commlayer keys add {keys.own.name} "
                           "--again`")
    if split_port(config.advertise, "advertise")[1]:  # a tunnel forwards the coordinator's port, and not that for TCP
        if config.carrier == "tcp":
            raise InvalidInput("E-SETTING", f"advertise: {config.advertise} is one port, but the setting carrier is \"tcp\", "
                                            "which needs two: remove that setting, or forward both ports and give HOST alone")
        config = msgspec.structs.replace(config, carrier="grpc")
    logging.basicConfig(level=logging.WARNING if part.parent else logging.INFO, handlers=[LogLines("commlayer serve")])
    if part.parent:
        config = msgspec.structs.replace(config, journal="")  # an embedded server is never restarted
    elif config.insecure:
        log.warning("insecure is set (--insecure, COMMLAYER_INSECURE or commlayer.toml): %s", "the page is not encrypted, but "
                    "the job is" if config.keys else "nothing of this job is encrypted; without it, homes are invited with "
                    "keys")
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < MAX_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_FILES) if hard >= 0 else MAX_FILES, hard))
    terminated, ends = threading.Event(), [threading.Event(), threading.Event()]

    def terminate() -> None:
        terminated.set()
        _stop(*ends)

    on_signal(signal.SIGTERM, terminate, SHUTDOWN_S + config.dead_after_s)
    following: tuple[Config, ServeOptions] | None = (config, part)
    with contextlib.ExitStack() as stack:
        events = log_of_job()
        if config.events and not config.join and not part.parent:
            stack.callback(EventFile(events, Path(config.events) / "events.jsonl").close)
        if part.page is not None:
            _serve_page(*part.page, config, events, stack)
        if part.watch is not None:
            stack.callback(part.watch(events))
        while following is not None and not terminated.is_set():
            following = _serve(*following, ends[0], ends[1], events)
            ends[:] = threading.Event(), threading.Event()


def _serve_page(host: str, port: int, config: Config, events: EventLog, stack: contextlib.ExitStack) -> None:
    # Imported late, because most servers need no HTTP.
    from commlayer.observe.pages.job_feed import JobFeed
    from commlayer.observe.pages.web import WebServer, read_token

    if not is_loopback(host) and not config.insecure:
        raise InvalidInput("E-PLAIN-TEXT", f"--page {host}: HTTP is not encrypted, and this is not a loopback address: use "
                                           "127.0.0.1 and a tunnel; or if you trust the network, --insecure together with "
                                           "--invite NAMES or --keys, which keep the job itself encrypted")
    keys, shown = Keys(config.keys) if config.keys else None, ""

    def token() -> str:
        """With keys, only this server can compute the token, and a revocation makes another one."""
        nonlocal shown
        if keys is not None:
            keys.revoked()  # reads the list again if it has changed
        valid = read_token(config.token.encode()) if keys is None else read_token(keys.key, keys.list_number)
        if valid != shown:
            shown = valid
            log.info("page: http://%s/?token=%s", server.address, valid)
            log.info("metrics for Prometheus: http://%s/metrics%s", server.address,
                     "" if is_loopback(host) else f" with the header Authorization: Bearer {valid}")
        return valid

    feed = JobFeed(events)
    stack.callback(feed.close)
    server = WebServer(host, port, token, feed.pages, public=("/metrics",))
    stack.callback(server.close)
    token()


def _serve(config: Config, part: ServeOptions, end: threading.Event, stopped: threading.Event, events: EventLog
           ) -> tuple[Config, ServeOptions] | None:
    """Serves one job. Returns the settings with which to serve the next one if the job failed, otherwise None."""
    is_resumable = functools.partial(_can_resume, config, end, stopped)
    reason, unfit = [messages.FINISHED], ""
    with contextlib.ExitStack() as stack:
        control, near, data, data_port = config.join, config.join, "", config.port
        coordinator: Coordinator | None = None
        member: client.Membership | None = None

        def orphaned() -> None:
            if coordinator is not None:
                coordinator.orphaned(part.parent)
            else:
                reason[0] = f"its training process (pid {part.parent}) has ended"

        if not control:
            data_port = part.data_port if part.data_port != messages.ANY else config.port and config.port + 1
            journal = CoordinatorJournal(config.journal) if config.journal else None
            if journal is not None:
                stack.callback(journal.close)
            if journal is not None and journal.recovered is not None:  # keep the address and secret that workers use
                port = config.port or host_port(journal.recovered.address)[1]
                part = part._replace(job_token=journal.recovered.token)
                config = msgspec.structs.replace(config, port=port, token=part.job_token or config.token)
            if journal is not None:
                journal.token = part.job_token
            coordinator = Coordinator(config, workers=part.workers, servers=part.servers, ended=end, journal=journal,
                                      embedded=part.parent > 0, events=events, ca=part.ca, invited=part.invited,
                                      streams=part.sums and config.carrier != "tcp")
            stack.callback(coordinator.close)
            control, near = coordinator.address, coordinator.local_address
        if part.parent:
            child_processes.follow_parent(part.parent, end, orphaned)
        if part.sums:
            # Imported late: it loads numpy, which a coordinator does not need.
            from commlayer.cluster.servers.data_server import DataServer

            serving = DataServer(config.bind, data_port, config, coordinator)
            stack.callback(lambda: serving.close(over=not is_resumable(), flush_s=None if part.parent or stopped.is_set() or
                                                 not end.is_set() else FINAL_FLUSH_S))
            data, streams = (_advertised(where, config) for where in (serving.address, serving.streams))
        if not part.restarted:
            secret = {"token": part.job_token} if part.job_token else {}
            print(json.dumps({"control": control, "data": data} | secret), flush=True)
        token = "COMMLAYER_KEYS" if config.keys else "the job's secret" + ", the token above" * bool(part.job_token)
        if part.ca:
            _invite(part, control, more=config.min_workers > 0)
        else:
            log.info("workers join with COMMLAYER_JOIN=%s and %s", control, token)
        if not (part.ca or config.join):
            log.info("on each other machine run: %s", _launch_command(config, control))
        if not config.join:
            log.info("watch the job: commlayer top %s%s", near, f" --keys {config.keys}" if config.keys else "")
        if part.sums:
            request = messages.server_request(data, config.node, part.number, colocated=not config.join, streams=streams)
            if serving.journal is not None:
                request = msgspec.structs.replace(request, restartable=True)
                if (former := serving.journal.recovered) is not None:  # use its previous registration
                    request = msgspec.structs.replace(request, token=former.token, rank=former.number)
            try:
                member = client.join(near, request, config, _log_failure, deadline_s=math.inf, ended=end,
                                     on_silence=functools.partial(_on_silence, serving, config, control, end, stopped))
            except CommError:
                if not end.is_set():
                    raise
            else:
                member.report.fields = serving.report
                stack.callback(lambda: member.close() if is_resumable() else member.leave(reason[0]))
                try:
                    # The coordinator of an embedded server starts no other epochs.
                    serving.start(member.epoch, member.plan, member.rank, request.token,
                                  await_epoch=None if part.parent else member.await_epoch)
                    member.subscribe(serving.change)
                except ValueError as error:
                    end.wait(REFUSE_S)
                    member.leave(str(error))
                    if part.parent:
                        raise
                    unfit = str(error)
                    end.set()
        end.wait()
        if is_resumable():
            log.info("stopped; the journal is kept, so the same command resumes the job; to end the job instead, remove %s",
                     config.journal)
            return None
        if unfit:
            failed = unfit
        elif coordinator is not None:
            failed = coordinator.failure
        else:
            failed = "its coordinator reports the failure" if member is not None and member.failed else ""
        if part.parent or stopped.is_set() or not failed:
            if not stopped.is_set():
                log.info("the job has finished; this server ends")
            return None
        log.warning("the job failed (%s); this server waits at %s for the next job",
                    short_line(without_code(failed), MAX_PEER_TEXT_CHARS), control)
    # Workers know the coordinator's address, and the coordinator sends them those of the servers.
    return (config if config.join else msgspec.structs.replace(config, port=host_port(control)[1]),
            part._replace(restarted=True, data_port=data_port))


def on_signal(number: signal.Signals, act: Callable[[], None], ends_s: float) -> None:
    """Calls `act` on a separate thread after this signal. A signal handler runs in the main thread, possibly inside a lock that
    `act` needs. The process exits at the latest `ends_s` seconds after the signal."""
    came = queue.SimpleQueue[None]()  # put() is reentrant, so a signal handler may call it

    def wait_for_signal() -> None:
        came.get()
        with contextlib.suppress(RuntimeError, ValueError, AttributeError, OSError):  # without standard error
            faulthandler.dump_traceback_later(ends_s, exit=True)
        act()

    threading.Thread(target=wait_for_signal, name="commlayer-signal", daemon=True).start()
    signal.signal(number, lambda *_: came.put(None))


def _stop(end: threading.Event, stopped: threading.Event) -> None:
    """Ends this process, although the job may not be over."""
    if not end.is_set():
        stopped.set()
    end.set()


def _can_resume(config: Config, end: threading.Event, stopped: threading.Event) -> bool:
    """Returns whether the job can be resumed: it has a journal, and this process does not know that the job has ended."""
    return bool(config.journal) and (stopped.is_set() or not end.is_set())


def _advertised(address: str, config: Config) -> str:
    return address and reachable_address(config.advertise, config.bind, host_port(address)[1])


def _invite(part: ServeOptions, control: str, *, more: bool) -> None:
    """Invites homes that have neither keys nor an invitation, and logs the line to paste at each home. Called when the server
    listens, because an invitation whose line is never shown would be in the way of the next start. `more`: True if further
    homes can join later."""
    from commlayer.cluster.keys import invitations  # imported late: it loads cryptography

    folder = Path(part.ca)
    invitations.set_address(folder, control)
    lines = invitations.commands(folder, part.invited, invitations.invite(folder, part.invited, keep=True), control)
    lines += [f"# for a further home, at any time: {invitations.command(folder)} NAME"] if more else []
    log.info("paste one line at each home, with your script instead of %s; a token (after #) works once, within %g hours; "
             "--check at the end only checks that home:\n%s",
             invitations.SCRIPT, invitations.VALID_HOURS, "\n".join(f"  {line}" for line in lines))


def _launch_command(config: Config, control: str) -> str:
    """Returns the command that starts a worker on a machine that accepts no connections, ready to copy."""
    if config.keys:  # each machine has its own folder
        return f"commlayer join --keys ITS-KEYS {control} SCRIPT"
    insecure = "" if is_loopback(host_port(control)[0]) else "--insecure "
    return f"COMMLAYER_TOKEN_FILE=FILE-WITH-THE-SECRET commlayer join {insecure}{control} SCRIPT"


def _on_silence(serving: DataServer, config: Config, control: str, end: threading.Event, stopped: threading.Event,
                silent_s: float) -> None:
    """Called while the coordinator does not answer, so no message can end the job. After the reconnect window, in which a
    restarted coordinator could ask how the job has ended, ends the server if no worker is left."""
    if end.is_set() or silent_s < reconnect_window_s(config):
        return
    if serving.finished:
        log.warning("coordinator %s has not answered for %.1f s and all workers have ended: this server "
                    "ends too", control, silent_s)
        end.set()
    elif serving.alone:
        log.warning("coordinator %s has not answered for %.1f s and no worker is connected: this server "
                    "ends", control, silent_s)
        _stop(end, stopped)


def _log_failure(error: CommError) -> None:
    """Logs the failure of a peer. Only workers act on such failures."""
    log.warning("%s", short_line(error, MAX_PEER_TEXT_CHARS))


def main() -> None:
    """Entry point of a child process that child_processes.py starts. Its argument is JSON of ServeOptions and of the
    coordinator to join."""
    options = json.loads(sys.argv[1])
    try:
        settings = {"token": child_processes.read_line().decode(), "join": options.pop("join")}
        run(read_config({name: value for name, value in settings.items() if value}), ServeOptions(**options))
    except (Coded, ValueError, OSError) as error:
        print(json.dumps({"error": error_line(error)}), flush=True)
        sys.exit(2)
