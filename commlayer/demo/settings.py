"""The demo's settings, parsed from the command line and checked."""

from __future__ import annotations

import re

from commlayer.errors import InvalidInput
from commlayer.records import Record

DENSE = "fp16()"
CODEC = "int4()"
BPS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SLOWEST_BPS, FASTEST_BPS = 1e6, 1e11
LONGEST_RTT_S = 10.0
MAX_WORKERS = 16


class DemoSettings(Record, frozen=True):
    """The settings of one demo. Both runs share all of them except the codec."""

    workers: int
    bps: float
    """Of each host, up and down."""
    rtt_s: float
    codec: str
    target: float
    width: int
    """Of the model's hidden layers."""
    max_steps: int
    folder: str = ""
    """A folder for the shared state of shaped links and for the workers' logs."""
    rate: float = 0.1
    batch: int = 32
    """Samples per worker and step."""
    every: int = 5
    """Steps between two measurements of the test accuracy."""
    seed: int = 0
    cut_nbytes: int = 1 << 19
    """Small enough that four servers get equal shares of a model of 4.5 MB."""

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2

    @property
    def deadline_s(self) -> float:
        """The deadline of one step: some ten times the time of a dense step."""
        return max(60.0, 10 * 2 * 8 * 4 * self.width**2 / self.bps)

    def shape(self, run: int) -> str:
        """The setting `shape` of a run. Each run has new links. The delays of sender and receiver add up."""
        host = f"up_bps={self.bps!r},down_bps={self.bps!r},delay_s={self.one_way_s / 2!r}"
        return f"path={self.folder}/links-{run},hosts={self.workers},{host}"


def read_settings(*, workers: int, link: str, rtt: str, codec: str, quick: bool) -> DemoSettings:
    """The checked settings. An error states in one line what was given and what is allowed."""
    if not 2 <= workers <= MAX_WORKERS:
        raise InvalidInput("E-CLI-OPTION",
                           f"--workers {workers}: allowed are 2 to {MAX_WORKERS} (each is a process of its own)")
    if codec != CODEC:
        check_codec(codec)
    return DemoSettings(workers, parse_link(link), parse_rtt(rtt), codec, target=0.9 if quick else 0.97,
                        width=256 if quick else 1024, max_steps=100 if quick else 600)


def check_codec(text: str) -> None:
    # Imported late: it loads numpy, which --help does not need.
    from commlayer.compressors import parse

    try:
        parse(text)
    except (TypeError, ValueError) as error:
        raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None


def parse_link(text: str) -> float:
    """Parses a rate to bits per second.

    >>> parse_link("100mbit"), parse_link("2.5 Gbit")
    (100000000.0, 2500000000.0)
    """
    bps = _quantity(text, BPS)
    if bps is None or not SLOWEST_BPS <= bps <= FASTEST_BPS:
        raise InvalidInput("E-CLI-OPTION",
                           f"--link {text!r}: allowed is a number of kbit, mbit or gbit, 1mbit to 100gbit, such as 100mbit")
    return bps


def parse_rtt(text: str) -> float:
    """Parses a time to seconds.

    >>> parse_rtt("30ms")
    0.03
    """
    rtt_s = _quantity(text, SECONDS)
    if rtt_s is None or rtt_s > LONGEST_RTT_S:
        raise InvalidInput("E-CLI-OPTION", f"--rtt {text!r}: allowed is a number of us, ms or s, 0ms to 10s, such as 30ms")
    return rtt_s


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None or match[2].lower() not in units:
        return None
    # Rounded, since 30 * 1e-3 is not 0.03.
    return round(float(match[1]) * units[match[2].lower()], 9)
