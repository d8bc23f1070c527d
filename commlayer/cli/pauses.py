"""Decides when a home trains: at given hours, while no person or other program uses the machine, and unless the owner has
paused the home.

`commlayer join` asks once a second. While there is a reason to pause, the home has left the job and its workers have ended, so
they hold no memory of the GPU; then it joins again.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from commlayer.cluster.calls.home_traffic import HOME
from commlayer.cluster.processes.folder_lock import CHECK_S
from commlayer.config import user_folder
from commlayer.errors import InvalidInput
from commlayer.files import try_lock
from commlayer.observe.caps import DAY_MIN, Caps, Hours, minute_of_day, parse_caps, parse_hours

When = Annotated[str, typer.Option(help="Train only at these hours, in local time, such as 22:00-07:00.", metavar="HOURS")]
IfBusy = Annotated[bool, typer.Option("--pause-if-busy", help="Pause while a person or another program uses this machine.")]
Watts = Annotated[int, typer.Option(help="Limit each GPU to this power, in watts, where nvidia-smi allows it.", min=0)]
Monthly = Annotated[str, typer.Option(help="Send and receive at most this much in a calendar month, such as 200GB.",
                                      metavar="BYTES")]
UploadShare = Annotated[str, typer.Option(help="Send at this share of the measured uplink at most, such as 60% or "
                                               "60%,22:00-07:00=100%.", metavar="SHARE")]
PAUSED = -1
"""Result of a try to train that a pause has ended."""
ASK_S = 1.0
LOOK_S = 5.0
"""Seconds between two checks of what other programs and users do on this machine."""
BUSY_S, QUIET_S = 20.0, 300.0
"""A machine counts as used after others have used it for BUSY_S, and as free QUIET_S after the last use."""
OTHERS = 0.5
"""Fraction of all cores that other programs must use to count as use of the machine."""
DECAY = 0.99
"""Factor per second on the highest rate of this home's traffic so far."""
GPU_PERCENT = 10
"""Use of a GPU's cores, in percent, from which another program counts as using the GPU."""
SMI_S = 5.0


def parse_allowed_hours(when: str) -> tuple[Hours, ...]:
    """Reads the option --when."""
    return tuple(parse_hours(part.strip(), "--when", when) for part in when.split(",")) if when else ()


def reason_closed(when: Sequence[Hours], now: datetime.datetime) -> str:
    """Returns why the home does not train at this hour; "" if it does."""
    minute = minute_of_day(now)
    if not when or any(hours.contain(minute) for hours in when):
        return ""
    begin = min(when, key=lambda hours: (hours.begin - minute) % DAY_MIN).begin
    return f"pauses until {begin // 60:02}:{begin % 60:02}"


class MachineUse(NamedTuple):
    """Use of this machine by other programs or users, and since when."""

    what: str = ""
    """The latest use; "" if there has been none."""
    since_s: float = 0.0
    """When the present use, or the time without use, began."""
    used: bool = False
    counts: bool = False
    """True: the machine counts as used."""

    def after_look(self, what: str, now: float) -> MachineUse:
        """Returns whether the machine counts as used after a check at the time `now`. `what`: the use that was found, or ""."""
        since_s = self.since_s if self.since_s and bool(what) == self.used else now
        long = now - since_s >= (BUSY_S if what else QUIET_S)
        return MachineUse(what or self.what, since_s, bool(what), bool(what) if long else self.counts)


class PauseRules:
    """Decides whether this home trains."""

    def __init__(self, when: str, *, if_busy: bool, caps: Caps = Caps()) -> None:
        """`when`: the option --when. Raises InvalidInput where the use of this machine is not known. With a monthly cap, also
        raises it if another home of this user has one, or if its traffic cannot be counted."""
        if if_busy and not Path("/proc/stat").exists():
            raise InvalidInput("E-SYSTEM", "--pause-if-busy needs /proc, which this system lacks; allowed here: --when, "
                                           "`commlayer pause`")
        self._when, self._if_busy, self._machine = parse_allowed_hours(when), if_busy, Machine()
        self._cap = MonthlyCap(caps) if caps.monthly_nbytes else None
        self._use, self._asked, self._looked = MachineUse(), 0.0, -math.inf
        self._looking: threading.Thread | None = None
        self._reason = ""

    def reason(self, own: Collection[int] = ()) -> str:
        """Returns why this home pauses now; "" if it trains. `own`: processes of this home, which run."""
        if (now := time.monotonic()) - self._asked >= ASK_S or not self._asked:
            self._asked = now
            self._reason = self._found(own, now)
        return self._reason

    def _found(self, own: Collection[int], now: float) -> str:
        if paused_mark().exists():
            return "pauses until its owner runs `commlayer resume`"
        if why := reason_closed(self._when, datetime.datetime.now()) or (self._cap.reason(now) if self._cap else ""):
            return why
        if not self._if_busy:
            return ""
        if not (self._looking and self._looking.is_alive()) and now - self._looked >= LOOK_S:
            self._looked = now
            self._looking = threading.Thread(target=self._check_machine_use, args=(tuple(own),), daemon=True)
            self._looking.start()
        return f"pauses while {self._use.what}" if self._use.counts else ""

    def _check_machine_use(self, own: Collection[int]) -> None:
        """Looks at the machine, on a thread of its own: a program that is asked may hang, and Ctrl-C must not."""
        self._use = self._use.after_look(self._machine.other_use(own), time.monotonic())

    def wait(self, log: Callable[[str], None]) -> bool:
        """Waits until this home trains, and says why it waits. Returns whether it has waited."""
        said = ""
        while reason := self.reason():
            if reason != said:
                log(f"this home {reason}")
                said = reason
            time.sleep(ASK_S)
        return bool(said)


class MonthlyCap:
    """The cap on this home's traffic of a month."""

    def __init__(self, caps: Caps) -> None:
        self._caps, self._full, self._nbytes_s = caps, "", 0.0
        self._last = time.monotonic(), HOME.count().used
        mark = user_folder() / "traffic.lock"
        try:
            self._lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput("E-FILE", f"{mark}: cannot be written: {error.strerror}; allowed: a folder in which this "
                                         "user may write, which XDG_CONFIG_HOME sets") from None
        if not try_lock(self._lock, CHECK_S):
            os.close(self._lock)
            raise InvalidInput("E-CLI-OPTION", f"--monthly: another home with a monthly cap uses {mark.parent}; end it, or "
                                               "give this home a folder of its own with XDG_CONFIG_HOME")

    def reason(self, now: float) -> str:
        """Returns why this home pauses; "" if it trains. `now`: time.monotonic()."""
        try:
            month = HOME.count()
        except InvalidInput as error:
            return f"pauses until its traffic can be counted: {error.what}"
        used, here = month.used, month.local_time
        (before, earlier), self._last = self._last, (now, used)
        self._nbytes_s = max(DECAY * self._nbytes_s, (used - earlier) / max(ASK_S, now - before))
        # After a pause the home has no rate, but it stays until the month turns.
        self._full = f"{here:%Y-%m}" if (why := self._caps.reason(used, self._nbytes_s, here)) else self._full
        return why or (self._caps.reason(math.inf, 0.0, here) if self._full == f"{here:%Y-%m}" else "")


def paused_mark() -> Path:
    """The file that says that the user has paused the homes of this machine."""
    return user_folder() / "paused"


def pause_homes() -> None:
    mark = paused_mark()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def resume_homes() -> None:
    paused_mark().unlink(missing_ok=True)


class Machine:
    """Checks what other programs and users do on this machine."""

    def __init__(self) -> None:
        self._cpu: tuple[float, float, float] | None = None
        """At the last look: time, and CPU seconds of all processes and of own ones."""

    def other_use(self, own: Collection[int]) -> str:
        """Returns what others do, as the end of a sentence; "" if nothing. Children of `own` processes are own, too."""
        tree = own_tree(own)
        return _gpu_use(tree) or self._cpu_use(tree) or _input_use()

    def _cpu_use(self, own: Collection[int]) -> str:
        now, total_s = time.monotonic(), busy_s()
        own_s = sum(filter(None, map(process_s, own)))
        before, self._cpu = self._cpu, (now, total_s, own_s)
        if before is None or now <= before[0]:
            return ""
        others_s = (total_s - before[1]) - max(0.0, own_s - before[2])
        return "other programs use the processor" if others_s > OTHERS * (os.cpu_count() or 1) * (now - before[0]) else ""


def busy_s() -> float:
    """CPU seconds of all processes since the machine started."""
    fields = [float(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait


def process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (float(fields[11]) + float(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_tree(own: Collection[int]) -> set[int]:
    parents = dict(_parents())
    tree = {*own, os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue


def _gpu_use(own: Collection[int]) -> str:
    """Returns that another program uses a GPU; "" if none does, or if that is unknown."""
    for line in command_output("nvidia-smi", "pmon", "-c", "1", "-s", "u").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1].isdigit() and int(fields[1]) not in own and fields[3].isdigit() and \
                int(fields[3]) >= GPU_PERCENT:
            return f"{fields[-1]} uses the GPU"
    return ""


def _input_use() -> str:
    """Returns that a person uses this machine; "" if none does, or if that is unknown."""
    idle = command_output("loginctl", "show-seat", "seat0", "--property=ActiveSession", "--property=IdleHint").split()
    return "a person uses this machine" if "IdleHint=no" in idle and "ActiveSession=" not in idle else ""


def command_output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@contextlib.contextmanager
def limited_power(watts: int) -> Iterator[None]:
    """Limits the power of all GPUs meanwhile; 0: not. Afterwards the GPUs have their usual power limits again. Raises
    InvalidInput if nvidia-smi refuses."""
    query = ("nvidia-smi", "--query-gpu=power.default_limit", "--format=csv,noheader,nounits")
    usual = command_output(*query).split() if watts else []
    if watts and not usual:
        raise InvalidInput("E-CLI-OPTION", f"--max-gpu-power {watts}: nvidia-smi names no GPU with a power limit; leave the "
                                           "option out")
    try:
        for number in range(len(usual)):
            if not command_output("nvidia-smi", f"--id={number}", f"--power-limit={watts}"):
                raise InvalidInput("E-CLI-OPTION", f"--max-gpu-power {watts}: nvidia-smi refuses it for GPU {number}; "
                                                   f"`nvidia-smi --id={number} --power-limit={watts}` as root says why")
        yield
    finally:
        for number, limit in enumerate(usual):
            command_output("nvidia-smi", f"--id={number}", f"--power-limit={limit}")


def systemd_unit(script: Path, args: Sequence[str], when: str, *, pause_if_busy: bool, watts: int, monthly: str = "",
                 upload_share: str = "") -> str:
    """Returns a systemd unit that runs `commlayer up` with these arguments when the machine starts."""
    parse_allowed_hours(when)
    parse_caps(monthly, upload_share)
    options = [*(["--when", when] if when else []), *(["--pause-if-busy"] if pause_if_busy else []),
               *(["--max-gpu-power", str(watts)] if watts else []), *(["--monthly", monthly] if monthly else []),
               *(["--upload-share", upload_share] if upload_share else [])]
    command = shlex.join([sys.executable, "-m", "commlayer", "up", *options, str(script.resolve()), *args]).replace("%", "%%")
    return Path(__file__).with_name("home.service").read_text("utf-8").strip().format(folder=Path.cwd(), command=command)


def pause() -> None:
    """Pause the homes of this machine, until `commlayer resume`: they leave their jobs, and their workers free the GPU."""
    pause_homes()
    print("commlayer: the homes of this machine pause, also after a restart, until `commlayer resume`")


def resume() -> None:
    """Let the homes of this machine train again."""
    resume_homes()
    print("commlayer: the homes of this machine train again when their hours allow it")
