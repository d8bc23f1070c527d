"""Caps of a home: how much it may send and receive in a calendar month, and which share of its uplink it may use.

Decisions are pure functions of what was counted and of the time. The count is a file of the user, which all processes of a home
share.
"""

from __future__ import annotations

import calendar
import datetime
import errno
import math
import os
import re
import time
from typing import Annotated, NamedTuple

import msgspec

from commlayer.config import user_folder
from commlayer.errors import InvalidInput
from commlayer.files import try_lock
from commlayer.records import Record, complete

DAY_MIN = 24 * 60
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
RESERVE = 0.005
"""Fraction of a monthly cap that is never planned for. This reserve covers traffic that a home sends while its clock is wrong,
or while it leaves."""
LEAVE_S = 4.0
"""Seconds between the last bytes that were counted and the end of a home that leaves."""
LEAST_S, LEAST_BPS = 60.0, 1e3
"""Shortest rest of a month for which a rate is computed, and the lowest rate: a home whose month is full pauses."""
MONTHS = 3
"""Number of latest months that the file keeps in addition to the present one."""
JUMP_S, DOUBT_S = 60.0, 3600.0
"""A clock that differs by more than JUMP_S from the time that has passed is not believed for DOUBT_S. Under a wrong date a home
could send what is left of a whole month."""
BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
FILE_NBYTES = 512
"""Size of the file. The file is overwritten in one system call, so a killed process leaves either the old count or the new
one."""
LOCK_S = 2.0


class Hours(NamedTuple):
    """A part of the day, from `begin` to before `end`, in minutes; over midnight if `end` is not later."""

    begin: int
    end: int

    def contain(self, minute: int) -> bool:
        return (minute - self.begin) % DAY_MIN < ((self.end - self.begin) % DAY_MIN or DAY_MIN)


def parse_hours(text: str, option: str = "--when", whole: str = "") -> Hours:
    """Reads a part of a day. `whole`: the option's value, for the error.

    >>> parse_hours("22:00-07:00")
    Hours(begin=1320, end=420)
    """
    try:
        begin, end = (datetime.time.fromisoformat(time.strip()) for time in text.split("-"))
        if begin.second or end.second or begin.tzinfo or end.tzinfo:
            raise ValueError
    except ValueError:
        raise InvalidInput("E-CLI-OPTION", f"{option} {whole or text!r}: {text!r} is no part of a day; allowed: HH:MM-HH:MM in "
                                           "local time, for example 22:00-07:00") from None
    return Hours(60 * begin.hour + begin.minute, 60 * end.hour + end.minute)


def minute_of_day(now: datetime.datetime) -> int:
    return 60 * now.hour + now.minute


class Caps(NamedTuple):
    """Limits on the traffic of a home. Without values there is no cap."""

    monthly_nbytes: float = 0.0
    """Bytes sent and received in a calendar month."""
    shares: tuple[tuple[Hours, float], ...] = ()
    """Parts of the day with the fraction of the uplink that the home may use then. The first part that contains a time counts.
    """

    def share(self, now: datetime.datetime) -> float:
        return next((share for hours, share in self.shares if hours.contain(minute_of_day(now))), 1.0)

    def monthly_bps(self, used: float, now: datetime.datetime) -> float:
        """Returns the average rate of both directions together, in bit/s, that uses up the cap at the end of the month.
        Infinite without a monthly cap. `used`: bytes so far."""
        if not self.monthly_nbytes:
            return math.inf
        left_s = max(LEAST_S, (next_month(now) - now).total_seconds())
        return max(LEAST_BPS, 8 * ((1 - RESERVE) * self.monthly_nbytes - used) / left_s)

    def last_bps(self, used: float) -> float:
        """Returns the highest rate of both directions together, in bit/s, at which a home can still leave before its cap.
        Infinite without a monthly cap."""
        left = (1 - RESERVE) * self.monthly_nbytes - used
        return max(LEAST_BPS, 8 * left / LEAVE_S) if self.monthly_nbytes else math.inf

    def reason(self, used: float, nbytes_s: float, now: datetime.datetime) -> str:
        """Returns why the home pauses; "" if it trains. `nbytes_s`: the rate of both directions, which lasts until the home has
        left."""
        if not self.monthly_nbytes or used + max(RESERVE * self.monthly_nbytes, LEAVE_S * nbytes_s) < self.monthly_nbytes:
            return ""
        return f"pauses until 1 {calendar.month_name[next_month(now).month]}"


def next_month(now: datetime.datetime) -> datetime.datetime:
    return datetime.datetime(now.year + now.month // 12, now.month % 12 + 1, 1)


def parse_caps(monthly: str = "", upload_share: str = "") -> Caps:
    """Reads the options --monthly and --upload-share.

    >>> parse_caps("200GB", "60%, 22:00-07:00=100%")
    Caps(monthly_nbytes=200000000000.0, shares=((Hours(begin=1320, end=420), 1.0), (Hours(begin=0, end=0), 0.6)))
    """
    shares, rest = list[tuple[Hours, float]](), list[tuple[Hours, float]]()
    for part in upload_share.split(",") if upload_share else ():
        hours, equals, share = part.rpartition("=")
        (shares if equals else rest).append((
            parse_hours(hours.strip(), "--upload-share", upload_share) if equals else Hours(0, 0),
            _share(share.strip(), upload_share)))
    if len(rest) > 1:
        raise InvalidInput("E-CLI-OPTION", f"--upload-share {upload_share!r}: gives {len(rest)} shares of the whole day; "
                                           "allowed: one, and parts of the day, for example 60%,22:00-07:00=100%")
    return Caps(_nbytes(monthly), (*shares, *rest))


def _nbytes(monthly: str) -> float:
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMGT]B)", monthly.strip())
    nbytes = float(number[1]) * UNITS[number[2]] if number else 0.0
    if monthly and nbytes < 1:
        raise InvalidInput("E-CLI-OPTION", f"--monthly {monthly!r}: allowed: a number above 0 with kB, MB, GB or TB, for "
                                           "example 200GB")
    return nbytes


def _share(text: str, whole: str) -> float:
    number = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?) ?%", text)
    if number is None or not 0 < float(number[1]) <= 100:
        raise InvalidInput("E-CLI-OPTION", f"--upload-share {whole!r}: {text!r} is no share; allowed: above 0% to 100%, for "
                                           "parts of the day as HH:MM-HH:MM=SHARE, for example 60%,22:00-07:00=100%")
    return float(number[1]) / 100


Nbytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Month(Record, frozen=True):
    """Bytes that homes have sent and received in the current month, and the time. The file holds it."""

    months: dict[str, Nbytes] = msgspec.field(default_factory=dict)
    """Bytes of months such as `2026-11`: the present one and up to MONTHS others."""
    at: Seconds = 0.0
    """The time, in seconds since 1970. A clock that jumps is believed after DOUBT_S."""
    boot_s: Seconds = 0.0
    """Seconds since the machine started, at that time."""
    doubted_s: Seconds = 0.0
    """`boot_s` when the clock was first seen to differ; 0 if it does not."""

    @property
    def local_time(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.at)

    @property
    def used(self) -> int:
        """Bytes that count for this month. Those of later months count, too: the clock was wrong then or is wrong now."""
        return sum(nbytes for month, nbytes in self.months.items() if month >= f"{self.local_time:%Y-%m}")

    def after_traffic(self, nbytes: int, clock: float, boot_s: float) -> Month:
        """Returns the state after more bytes. `clock`: the time by the machine's clock."""
        expected = self.at + boot_s - self.boot_s
        doubted_s = self.doubted_s or boot_s
        if boot_s < self.boot_s or not self.at or abs(clock - expected) <= JUMP_S or boot_s - doubted_s >= DOUBT_S:
            expected, doubted_s = clock, 0.0
        month = f"{datetime.datetime.fromtimestamp(expected):%Y-%m}"
        months = {name: self.months.get(name, 0) + (nbytes if name == month else 0)
                  for name in sorted({*sorted(self.months)[-MONTHS:], month})}
        return Month(months, expected, boot_s, doubted_s)


def add_to_month(nbytes: int) -> Month:
    """Adds bytes to the count of this user's homes, and returns the count. Several processes may call it at once. Raises
    InvalidInput if the file cannot be used; then nothing was added."""
    path = user_folder() / "traffic.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb", buffering=0) as file:
            if not try_lock(file.fileno(), LOCK_S):
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            month = msgspec.json.decode(text, type=complete(Month)) if (text := file.read().strip()) else Month()
            month = month.after_traffic(nbytes, time.time(), time.clock_gettime(BOOT))
            os.pwrite(file.fileno(), msgspec.json.encode(month).ljust(FILE_NBYTES), 0)
            return month
    except OSError as error:
        raise InvalidInput("E-FILE", f"{path}: the traffic of this month cannot be counted: {error.strerror}; allowed: a file "
                                     "that this user may write, in the folder that XDG_CONFIG_HOME sets") from None
    except msgspec.MsgspecError as error:
        raise InvalidInput("E-FILE", f"{path}: is damaged ({error}); delete it to count this month from 0") from None
