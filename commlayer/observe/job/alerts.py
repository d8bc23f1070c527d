"""Alerts of a run: a home is missing, the loss is not finite, the run is over. Each alert has one cause, and each cause leads
to one alert.

An alert goes to a command, a webhook, ntfy or mail, on a thread of its own. The text of an alert is the one in `commlayer log`.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import shlex
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from email.message import EmailMessage
from typing import NamedTuple
from urllib.parse import urlsplit

from commlayer.errors import InvalidInput, short_line
from commlayer.observe.events import COORDINATOR, Event, LogEvent, MemberEvent, WaitEvent
from commlayer.observe.job.job_view import JobView, pause_reason

log = logging.getLogger("commlayer")

SEND_S = 10.0
"""Seconds for the delivery of one alert to one receiver."""
EVERY_S = 30.0
"""Shortest time between two deliveries. Alerts that come sooner are sent together."""
MOST = 16
"""Number of alerts that wait. Further ones are dropped."""
SILENT_S = 30.0
"""Seconds without heartbeats after which a home is missing, if it has not died before."""
NO_NUMBER = re.compile(r"the loss is (nan|-?inf) at step \d")
"""A member's message about a loss that is not finite (engine/job/run_events.py)."""
ALLOWED = "ntfy://TOPIC, ntfy://HOST/TOPIC, http:// or https:// with a host, mailto:NAME@HOST, or a command that exists"


class Alert(NamedTuple):
    """`cause`: "missing", "loss", "done" or "failed"."""

    cause: str
    text: str
    run: str
    time: float


Send = Callable[[Alert], None]
"""Delivers an alert within SEND_S, or raises an error."""


class Receiver(NamedTuple):
    """`name` is for logs: an address can contain a secret, so it has only its kind and its host."""

    name: str
    send: Send


def parse_receiver(text: str) -> Receiver:
    """Reads a value of --alert. Raises InvalidInput."""
    kind = text.partition(":")[0]
    if kind in ("ntfy", "http", "https") and "://" in text:
        return _web(text, kind)
    if kind == "mailto":
        address, program = text.removeprefix("mailto:"), shutil.which("sendmail", path="/usr/sbin:/usr/lib:/usr/bin:/sbin")
        if not re.fullmatch(r"[^\s@<>,;:]+@[^\s@<>,;:]+", address):
            raise InvalidInput("E-CLI-OPTION", f"--alert mailto:...: is not one e-mail address; allowed are {ALLOWED}")
        if program is None:
            raise InvalidInput("E-CLI-OPTION", "--alert mailto:...: this machine has no program sendmail: install one, or use "
                                               "ntfy://TOPIC or a webhook")
        return Receiver("mail", lambda alert: _run([program, "-i", "--", address], _mail(alert, address)))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--alert: the command cannot be read ({error}); allowed are {ALLOWED}") from None
    if not words or shutil.which(words[0]) is None:
        raise InvalidInput("E-CLI-OPTION", f"--alert: there is no program {short_line(words[0] if words else '', 40)!r}; "
                                           f"allowed are {ALLOWED}")
    return Receiver(f"command {words[0]}", lambda alert: _run([*words, alert.text]))


def _web(text: str, kind: str) -> Receiver:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not text.isprintable() or " " in text:
        raise InvalidInput("E-CLI-OPTION", f"--alert {kind}://...: no host or topic; allowed are {ALLOWED}")
    if kind == "ntfy":
        server, topic = (parts.netloc, parts.path.strip("/")) if parts.path.strip("/") else ("ntfy.sh", parts.netloc)
        return Receiver(f"ntfy {host if parts.path.strip('/') else server}", lambda alert: _post(
            f"https://{server}/{topic}", alert.text.encode(), {"Title": f"commlayer: {alert.cause}"}))
    return Receiver(f"{kind}://{host}", lambda alert: _post(
        text, json.dumps(alert._asdict()).encode(), {"Content-Type": "application/json"}))


def _post(url: str, data: bytes, headers: dict[str, str]) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method="POST"), timeout=SEND_S) as answer:
        answer.read(1)


def _run(command: Sequence[str], data: bytes = b"") -> None:
    subprocess.run(command, input=data, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SEND_S, check=True)


def _mail(alert: Alert, address: str) -> bytes:
    mail = EmailMessage()
    mail["To"], mail["Subject"] = address, f"commlayer: {alert.cause}"
    mail.set_content(alert.text)
    return mail.as_bytes()


def causes(view: JobView, event: Event) -> Iterator[tuple[str, str]]:
    """Yields the causes for alerts in an event that `view` has just applied, each with the name of its home."""
    match event:
        case MemberEvent(state="dead" | "left") if event.member.startswith("worker"):
            if not view.over and (event.reason or event.state == "dead") and not pause_reason(event.reason):
                yield "missing", event.member
            if view.over:
                yield ("failed" if view.failed else "done"), ""
        case WaitEvent(what="heartbeat", over=False) if event.rank == COORDINATOR and event.waited_s >= SILENT_S:
            yield from (("missing", name) for name in event.names)
        case LogEvent(level="warning") if NO_NUMBER.match(event.text):
            yield "loss", ""


class Alerts:
    """Sends alerts until close(). `apply` never waits."""

    def __init__(self, receivers: Sequence[Receiver], every_s: float = EVERY_S) -> None:
        self._receivers, self._every_s, self._seen = receivers, every_s, set[tuple[str, str, str]]()
        self._queue, self._closing = queue.Queue[Alert | None](MOST + 1), threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="commlayer-alerts", daemon=True)
        if receivers:
            self._thread.start()

    def apply(self, view: JobView, event: Event, sentences: Sequence[str]) -> None:
        """Sends alerts for an event that `view` has applied. `sentences`: the event in words; the last sentence is the alert's
        text."""
        for cause, about in causes(view, event):
            key = view.job.run, cause, about
            if key in self._seen or not self._receivers or self._queue.qsize() >= MOST:
                continue
            self._seen.add(key)
            text = sentences[-1] if sentences else f"{view.display(about)} has sent no heartbeats for {SILENT_S:.0f} s."
            self._queue.put_nowait(Alert(cause, text, view.job.run, event.time))

    def _send_all(self) -> None:
        ends = False
        while not ends:
            found = [self._queue.get()]
            while not self._queue.empty():
                found.append(self._queue.get())
            ends, alerts = None in found, [alert for alert in found if alert is not None]
            if alerts:
                self._send(alerts[-1]._replace(text=" ".join(alert.text for alert in alerts)))
            ends = ends or (self._closing.wait(self._every_s) and self._queue.empty())

    def _send(self, alert: Alert) -> None:
        for receiver in self._receivers:
            try:
                receiver.send(alert)
            except Exception as error:  # whatever a receiver does, later alerts are sent
                log.warning("the alert to %s failed: %s", receiver.name, type(error).__name__)

    def close(self) -> None:
        """Sends what waits, which takes at most SEND_S for each receiver."""
        if self._receivers:
            self._closing.set()
            self._queue.put_nowait(None)
            self._thread.join(SEND_S * (1 + len(self._receivers)))
