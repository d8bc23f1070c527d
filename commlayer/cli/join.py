"""The commands `commlayer join` and `commlayer up`. `join` starts a training script on a machine that accepts no connections,
as torchrun does in a cluster. `up` does the same with the keys that the machine has, or prints the next command to type."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from commlayer.cli.doctor import examine
from commlayer.cli.options import Insecure, Keys, config_from_options, config_with_secret, fetched_keys, parse_line, stored_keys
from commlayer.cli.pauses import PAUSED, IfBusy, Monthly, PauseRules, UploadShare, Watts, When, limited_power, systemd_unit
from commlayer.cluster.keys import home_keys
from commlayer.cluster.keys.home_keys import HomeLine
from commlayer.config import JOIN_AGAIN, Config, Launch, home_environment, leave_reason_file
from commlayer.errors import CommError, InvalidInput, RecordError, find_error_code, without_code
from commlayer.files import write_whole
from commlayer.observe.caps import parse_caps

if TYPE_CHECKING:
    from commlayer.cluster.calls.site_client import SiteLease

Child = subprocess.Popen[bytes]
CHECK = "--check"
POLL_S = 0.1
TRIES, TRIED_S = 5, 600.0
"""How often a home joins in a row, if the job ended or had no place left before it had joined, if it was removed because the
others did not hear from it, or if another home was lost before the job began; and seconds after which a try does not count."""
AWAY = "it was not heard from, and joins again"
"""The reason that the server logs for a home that the job has removed."""
END_S = 30.0
"""Seconds that a home's other workers get to end after a failure or Ctrl-C. Before the workers end, they notify the other
homes."""


def join(
    address: Annotated[str, typer.Argument(help="The home's line, NAME@HOST:PORT#TOKEN; or host:port, with --keys.",
                                           metavar="ADDR")],
    script: Annotated[Path | None, typer.Argument(help="The training script, as torchrun would start it.", metavar="SCRIPT",
                                                  show_default=False)] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", metavar="ARGS")] = None,
    keys: Keys = "", insecure: Insecure = False,
    nproc_per_node: Annotated[int, typer.Option(help="Workers on this machine, one for each GPU.", min=1)] = 1,
    node_rank: Annotated[int, typer.Option(help="This home's number from 0; -1: in the order of joining.", min=-1)] = -1,
    full: Annotated[bool, typer.Option("--traceback", help="Print tracebacks of commlayer's errors.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other homes.", min=0.0)] = 600.0,
    check: Annotated[bool, typer.Option(CHECK, help="Fetch the certificate, check this machine, its link and the script, "
                                        "and do not join.")] = False,
    when: When = "", pause_if_busy: IfBusy = False, max_gpu_power: Watts = 0, monthly: Monthly = "",
    upload_share: UploadShare = "",
) -> None:
    """Train with other homes through `commlayer serve`. This machine connects only to that server. The first time, a home's
    line fetches a certificate; later the token after # is not needed.

    Options of this command come before the script; what follows the script belongs to the script, except --check. To pass
    --check to the script: SCRIPT -- --check.
    """
    if check:
        return examine(address, keys=keys, insecure=insecure, script=script)
    if script is None:
        raise typer.BadParameter("give the training script, or --check", param_hint="'SCRIPT'")
    if not script.is_file():  # before the token is used
        raise InvalidInput("E-CLI-OPTION", f"{script}: no such file; allowed: a script of Python")
    pauses = PauseRules(when, if_busy=pause_if_busy, caps=parse_caps(monthly, upload_share))
    if home_keys.is_invitation(address):
        home = parse_line(address, keys)
        keys, address = str(fetched_keys(home, _log)), home.address
    else:
        address, keys = stored_keys(address, keys, insecure=insecure)
    config = config_with_secret("joining", join=address, insecure=insecure, keys=keys)
    settings = {"join": config.join, "insecure": "true" if config.insecure else "", "keys": config.keys if keys else "",
                "monthly": monthly, "upload_share": upload_share}
    line = ["traceback" if full else "line", str(script), *(args or [])]
    tries, answer_s = TRIES, 0.0
    while tries:
        if pauses.wait(_log):
            _log("this home trains again")
        begin = time.monotonic()
        with limited_power(max_gpu_power):
            code = _train(config, line, nproc_per_node, node_rank, wait, answer_s, settings, pauses)
        if code == PAUSED:
            continue
        if code != JOIN_AGAIN:
            break
        tries = tries - 1 if time.monotonic() - begin < TRIED_S else TRIES
        answer_s = wait  # this home's line may still be broken
        if tries:
            _log("this home is not in that job: joining again")
    raise typer.Exit(code)


def _train(config: Config, line: Sequence[str], nproc_per_node: int, node_rank: int, wait: float, answer_s: float,
           settings: Mapping[str, str], pauses: PauseRules) -> int:
    """Joins one job with all workers of this home. `wait`, `answer_s`: see SiteLease.meet. Returns the exit code of the first
    worker that failed, or 0; PAUSED if this home pauses."""
    # Imported late: these load grpc, which --help does not need.
    from commlayer.cluster.calls import messages
    from commlayer.cluster.calls.site_client import SiteLease

    lease = SiteLease(config.join, config, messages.site_request(nproc_per_node, node_rank), _log)
    reason = "it was interrupted"
    try:
        with _interrupts_call(signal.default_int_handler):  # so that a home that waits leaves in order
            reply = lease.register_and_wait(wait, answer_s)
        first = _first_rank(reply, nproc_per_node)
        last = first + nproc_per_node - 1
        ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
        if reply.joins:
            _log(f"joining the running job with {ranks} of {reply.world}; other homes log this home as worker {reply.rank}")
        else:
            workers = f"{reply.world} worker{'s' * (reply.world > 1)}"
            start = f"starting with {workers}" if reply.min_workers else "all homes have joined"
            _log(f"{start}: this home has {ranks} of {reply.world}")
        settings = {**settings, "min_workers": str(reply.min_workers)}
        children = [_start(line, lease.request.token, reply, local, nproc_per_node, settings)
                    for local in range(nproc_per_node)]
        code, reason = _wait(children, lease, pauses, may_leave=reply.min_workers > 0)
    except CommError as error:
        reason = str(error)
        raise
    finally:
        lease.close(reason)
    if code and code != JOIN_AGAIN and not lease.ended.is_set():
        stay = f"continue if they have {reply.min_workers} workers" if lease.begun else "join again"
        others = stay if reply.min_workers else "end, too"
        _log(f"{reason}; the other homes {others}")
    return code


class JoinCommand(TyperCommand):
    """Accepts this command's options also after the home's line, and --check everywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_order(args, {name for one in self.params if not getattr(one, "is_flag", True)
                                                       for name in one.opts}))


def in_order(words: Sequence[str], valued: Collection[str]) -> list[str]:
    """Returns the arguments of `commlayer join` with its own options first. `valued`: the options that have a value.

    >>> in_order(["home-1@h:1", "--wait", "5", "train.py", "--wait", "9", "--check"], {"--wait"})
    ['--check', '--wait', '5', 'home-1@h:1', 'train.py', '--wait', '9']
    >>> in_order(["home-1@h:1", "train.py", "--", "--check"], {"--wait"})
    ['home-1@h:1', 'train.py', '--check']
    """
    options, places, rest = list[str](), list[str](), list(words)
    while rest and rest[0] != "--" and len(places) < 2:  # up to the script
        is_option = rest[0].startswith("-")
        count = 2 if rest[0] in valued else 1
        (options if is_option else places).extend(rest[:count])
        del rest[:count]
    if len(places) == 2 and rest[:1] == ["--"]:
        del rest[0]
    elif CHECK in rest:  # added at the end of a line that would start training
        rest.remove(CHECK)
        options.insert(0, CHECK)
    return [*options, *places, *rest]


def _log(line: str) -> None:
    print(f"commlayer join: {line}", file=sys.stderr, flush=True)


def _first_rank(reply: Any, workers: int) -> int:
    return int(reply.world - workers if reply.joins else reply.rank)


def _start(line: Sequence[str], home: str, reply: Any, local: int, workers: int, settings: Mapping[str, str]) -> Child:
    """Starts a worker in its own session. Ctrl-C then reaches only this process, which forwards the signal once."""
    joins = reply.rank + local if reply.joins else -1
    mine = Launch(_first_rank(reply, workers) + local, reply.world, local, workers, reply.node, reply.node, home, joins)
    command = [sys.executable, "-u", "-m", "commlayer.cluster.processes.script_host", str(os.getpid()), *line]
    return subprocess.Popen(command, env=home_environment(mine, reply.nodes, settings), start_new_session=True)


def _wait(children: Sequence[Child], lease: SiteLease, pauses: PauseRules, *, may_leave: bool) -> tuple[int, str]:
    """Waits for all workers. Returns the exit code of the first failure (130 after Ctrl-C, PAUSED) and the reason for log
    lines. `may_leave`: whether the job continues without a home."""
    code, reason, until = 0, "finished", 0.0
    interrupted: list[int] = []
    killed = set[int]()
    with _interrupts_call(lambda number, _: interrupted.append(number)):
        while any(child.poll() is None for child in children):
            failed = _failed(children)
            if code != 130 and interrupted:
                code, reason, until = 130, "this home was interrupted", time.monotonic() + END_S
                _log(f"interrupted: this home tells the others and leaves, within {END_S:g} s")
                _signal(children, signal.SIGINT)
            elif not until and failed:
                until = time.monotonic() + END_S
                code, reason = _exit_code(failed[0]), _failure_text(failed[0])
            elif not until and lease.ended.is_set():
                _log(lease.why)
                again = may_leave and find_error_code(lease.why) == "E-RENDEZVOUS-ENDED"
                code, reason, until = JOIN_AGAIN if again else 2, lease.why, time.monotonic() + END_S
            elif not until and (why := pauses.reason([child.pid for child in children])):
                code, reason, until = PAUSED, f"this home {why}", time.monotonic() + END_S
                leave_reason_file(os.getpid()).parent.mkdir(parents=True, exist_ok=True)
                write_whole({leave_reason_file(os.getpid()): why.encode()})  # the reason that the workers give to the others
                _signal(children, signal.SIGINT)
            elif until and time.monotonic() > until:
                killed = {-signal.SIGKILL}
                _signal(children, signal.SIGKILL)
            time.sleep(POLL_S)
    leave_reason_file(os.getpid()).unlink(missing_ok=True)
    failed = _failed(children)
    if code not in (0, JOIN_AGAIN) or not failed:
        return code, reason
    by_itself = [one for one in failed if one not in (JOIN_AGAIN, *killed)]
    return (_exit_code(by_itself[0]), _failure_text(by_itself[0])) if by_itself else (JOIN_AGAIN, reason if until else AWAY)


def _failed(children: Sequence[Child]) -> list[int]:
    """Returns the exit codes of failures. Signals come first: the other workers of a home end because of a killed one."""
    return sorted(child.returncode for child in children if child.returncode)


def _exit_code(returned: int) -> int:
    return returned if returned > 0 else 128 - returned


def _failure_text(returned: int) -> str:
    how = f"exit code {returned}" if returned > 0 else f"signal {signal.Signals(-returned).name}"
    return f"a worker of this home ended with {how}"


def _signal(children: Sequence[Child], number: signal.Signals) -> None:
    for child in children:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)


@contextlib.contextmanager
def _interrupts_call(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Calls `handler` on SIGINT and SIGTERM. The handler takes no lock, because one signal may interrupt the handler of another
    signal."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


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
    when: When = "", pause_if_busy: IfBusy = False, max_gpu_power: Watts = 0, monthly: Monthly = "",
    upload_share: UploadShare = "",
    daemon: Annotated[bool, typer.Option("--daemon", help="Print a systemd unit that runs this when the machine starts.")
                      ] = False,
) -> None:
    """Join with the keys of this machine's home, or say what to do next. Exit code 2 if a script was not started."""
    if daemon:
        if script is None or not script.is_file():
            raise InvalidInput("E-CLI-OPTION", f"--daemon: got the script {str(script or '')!r}; allowed: a script of Python")
        print(systemd_unit(script, args or [], when, pause_if_busy=pause_if_busy, watts=max_gpu_power, monthly=monthly,
                           upload_share=upload_share))
        return
    facts = facts_about(str(script or ""))
    if line := next_step(facts):
        print(f"commlayer up: {line}")
        raise typer.Exit(2 if script else 0)
    assert script is not None
    join(str(facts.homes[0]), script, args, when=when, pause_if_busy=pause_if_busy, max_gpu_power=max_gpu_power,
         monthly=monthly, upload_share=upload_share)


def facts_about(script: str) -> Facts:
    """Collects the facts. Asks the server only if there is one home."""
    facts = Facts(home_keys.stored_lines(), (Path("keys") / "ca.key").exists(), script)
    if len(facts.homes) != 1:
        return facts
    # Imported late: these load grpc, which --help does not need.
    from commlayer.cluster.calls.coordinator_channel import CALL_S, connect
    from commlayer.cluster.calls.messages import StatusReply, StatusRequest

    (home,) = facts.homes
    try:
        with contextlib.closing(connect(config_from_options(join=home.address, keys=str(home.folder)))) as channel:
            status = channel.call("Status", StatusRequest(), StatusReply, CALL_S)
    except (CommError, RecordError, InvalidInput) as error:
        return facts._replace(problem=without_code(error))
    return facts._replace(begun=status.begun, workers=status.workers, free_seats=status.free_seats)
