"""Parses and validates the demo's settings from the command line."""

from __future__ import annotations

from commlayer.errors import InvalidInput
from commlayer.records import Record

DENSE = "fp16()"
CODEC = "int4()"
SLOWEST_BPS, FASTEST_BPS = 1e6, 1e11
LONGEST_RTT_MS = 10000
MAX_WORKERS = 16


class DemoSettings(Record, frozen=True):
    """The settings of one demo. Both runs share all of them except the codec."""

    workers: int
    bps: float
    """Link rate of each host in bit/s, up and down."""
    rtt_s: float
    codec: str
    target: float
    width: int
    """Width of the model's hidden layers."""
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
    """Buckets are cut to this many bytes: small enough for four servers to get equal shares of a model of 4.5 MB."""

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2

    @property
    def deadline_s(self) -> float:
        """Deadline of one step in seconds: about ten times the duration of an uncompressed step."""
        return max(60.0, 10 * 2 * 8 * 4 * self.width**2 / self.bps)

    def shape(self, run: int) -> str:
        """The value of the setting `shape` (link simulation) for a run. Each run has new links. The delays of sender and
        receiver add up."""
        host = f"up_bps={self.bps!r},down_bps={self.bps!r},delay_s={self.one_way_s / 2!r}"
        return f"path={self.folder}/links-{run},hosts={self.workers},{host}"


def read_settings(*, workers: int, link: str, rtt_ms: float, codec: str, quick: bool) -> DemoSettings:
    """Validates the options and returns the settings. An error states in one line what was given and what is allowed."""
    # Imported late: they load numpy, which --help does not need.
    from commlayer.compressors import parse
    from commlayer.planner.inputs import rate_of

    if not 2 <= workers <= MAX_WORKERS:
        raise InvalidInput("E-CLI-OPTION",
                           f"--workers {workers}: allowed are 2 to {MAX_WORKERS} (each worker is a process)")
    try:
        bps = rate_of(link)
    except ValueError:
        bps = 0.0
    if not SLOWEST_BPS <= bps <= FASTEST_BPS:
        raise InvalidInput("E-CLI-OPTION", f"--link {link!r}: allowed is a rate from 1Mb to 100Gb, such as 100Mb")
    if not 0 <= rtt_ms <= LONGEST_RTT_MS:
        raise InvalidInput("E-CLI-OPTION", f"--rtt {rtt_ms:g}: allowed are milliseconds from 0 to {LONGEST_RTT_MS}")
    try:
        parse(codec)
    except (TypeError, ValueError) as error:
        raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None
    return DemoSettings(workers, bps, rtt_ms / 1e3, codec, target=0.9 if quick else 0.97, width=256 if quick else 1024,
                        max_steps=100 if quick else 600)
