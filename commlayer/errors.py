"""Defines all errors.

There are three kinds. CommError: the network or a peer failed; discard the step. InvalidInput: an argument, file or setting is
wrong. InvalidState: a call was made at the wrong time. Every other exception is a bug. Each message ends with the error's code.
Messages can change between versions; codes do not.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import ClassVar, Self

_CODE = re.compile(r"(?:^| )\[(E-[A-Z][A-Z-]{1,38})\]")
"""A code at the end of a message. docs/reference_pages/error_codes.toml lists all codes."""
GENERIC = ("", "E-RECORD")
"""Unspecific codes. If a text quotes an error with one of these codes, the new error keeps its own code instead of the quoted
one."""


class Coded(Exception):
    """An error with a code. If the text quotes another coded error, the new error takes that code, which is more specific."""

    def __init__(self, code: str, text: str) -> None:
        inner = find_error_code(text)
        self.code = code if inner in GENERIC else inner
        self.what = without_code(text)
        super().__init__(code, text)

    def __str__(self) -> str:
        return f"{self.what} [{self.code}]"


class InvalidInput(Coded, ValueError):
    """Raised if an argument, file or setting is wrong. The one-line message names the mistake, the allowed values and the
    remedy."""


class RecordError(InvalidInput):
    """A record, plan or setting has a field of the wrong type or with a forbidden value."""


class InvalidState(Coded, RuntimeError):
    """A call was made at the wrong time, for example after the session was closed."""


class CommError(Coded):
    """Communication failed. `peer` names the other side, such as "worker 2" or "server 0"; step and bucket are None if unknown.
    The message is one printable line, since a part of it may come from the peer."""

    default_code: ClassVar[str] = "E-COMM"

    def __init__(self, what: str, *, peer: str = "", step: int | None = None, bucket: int | None = None,
                 code: str = "") -> None:
        super().__init__(code or self.default_code, what)
        self.args = (what,)
        self.peer, self.step, self.bucket = peer, step, bucket
        self._named = ""

    def __str__(self) -> str:
        place = [] if self.step is None else [f"step {self.step}"]
        place += [] if self.bucket is None else [f"bucket {self.bucket}"]
        head = ": ".join(part for part in (self._named or self.peer, self.what) if part)
        return one_line(f"{head} ({', '.join(place)}) [{self.code}]" if place else f"{head} [{self.code}]")

    def located(self, *, what: str | None = None, peer: str | None = None, step: int | None = None,
                bucket: int | None = None) -> Self:
        """Returns a copy with another text, peer, step or bucket. Arguments that are None keep the old value."""
        other = copy.copy(self)
        for name, value in (("what", what and without_code(what)), ("peer", peer), ("step", step), ("bucket", bucket)):
            if value is not None:
                setattr(other, name, value)
        return other

    def call(self, named: str) -> None:
        """Sets the name that the message shows for the peer, such as "worker 2 (ben)". The attribute `peer` does not change."""
        self._named = named if self.peer else ""


class PeerLost(CommError):
    """The peer is gone: its connection ended, its heartbeats stopped, or it left the job."""

    default_code = "E-PEER-LOST"


class SentNothing(PeerLost):
    """Raised if the process that opened the connection closed it before it sent a message."""

    def __init__(self, what: str = "the connection was closed before any message was sent", *, peer: str = "") -> None:
        super().__init__(what, peer=peer)


class HandshakeLost(PeerLost):
    """Raised if the connection that a peer opened was lost during its handshake."""


class PeerEnded(PeerLost):
    """The peer closed its connection normally: everything that the peer had sent has arrived."""

    default_code = "E-PEER-ENDED"


class StepAbandoned(CommError):
    """A worker abandoned a step, so no rank applies it. Gradients are unchanged, and training continues with the next step."""

    default_code = "E-STEP-ABANDONED"


class DeadlineExceeded(CommError):
    """The peer did not answer in time; it might still be running."""

    default_code = "E-DEADLINE"


class CorruptFrame(CommError):
    """Received bytes violate the wire format. The receiver closes the connection and discards the bytes."""

    default_code = "E-FRAME"


class CorruptPayload(CorruptFrame):
    """A received payload violates its codec's format."""

    default_code = "E-PAYLOAD"


class Damaged(CorruptFrame):
    """Received bytes do not match their checksum. The cause is probably the network, not the peer."""

    default_code = "E-CHECKSUM"


class Refused(CommError):
    """The other side refused the request, for example because of another version, another job, or a rank that is taken."""

    default_code = "E-REFUSED"


class NotYet(Refused):
    """The other side refused the request temporarily: a later attempt might succeed."""


def error_line(error: Exception) -> str:
    """The line that a command prints for an error that the user can correct. For an OSError without a file name, the line is
    only the system's description."""
    return error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)


def exit_reason(error: BaseException) -> str:
    r"""The reason that is sent to other ranks when an exception ends a script: the exception's class and the first line of its
    text. A pause ends it with KeyboardInterrupt, whose text is the reason.

    >>> exit_reason(KeyboardInterrupt()), exit_reason(ValueError("no room\nfor it")), exit_reason(KeyboardInterrupt("pauses"))
    ('KeyboardInterrupt', 'ValueError: no room', 'pauses')
    """
    message = str(error).strip().partition("\n")[0]
    if message and isinstance(error, KeyboardInterrupt):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


MAX_PEER_TEXT_CHARS = 300
"""Maximum length of text from a peer in a log line."""


def one_line(text: object) -> str:
    """Escapes unprintable characters in text from a peer, for errors and logs: a line break in it could forge log lines."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def short_line(text: object, most: int) -> str:
    r"""Escapes text from a peer as one_line() does, and shortens it to `most` characters. An error code at the end is kept.

    >>> short_line("not\nmore than this", 12)
    'not\\nmore...'
    """
    code = find_error_code(text)
    room = most - len(append_code(code, "")) if code else most
    line = one_line(without_code(text)[: room + 1])
    line = line if len(line) <= room else f"{line[: room - 3]}..."
    return append_code(code, line) if code else line


def join_names(names: Sequence[str], most: int) -> str:
    """Joins at most `most` names, and says how many more there are.

    >>> join_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def find_error_code(text: object) -> str:
    """The first error code in a text or in an error's message; "" if there is none.

    >>> find_error_code("peer: no answer [E-DEADLINE]")
    'E-DEADLINE'
    """
    match = _CODE.search(str(text))
    return match[1] if match else ""


def append_code(code: str, text: str) -> str:
    """Appends a code to the text of a refusal. The process that receives the text raises an error with this code.

    >>> Refused(append_code("E-RANK", "rank 1 is taken")).code
    'E-RANK'
    """
    return f"{text} [{code}]"


def without_code(text: object) -> str:
    """Removes error codes from a text that is quoted in the middle of a longer message.

    >>> without_code("peer: no answer [E-DEADLINE]")
    'peer: no answer'
    """
    return _CODE.sub("", str(text))


def check_nbytes(nbytes: int, most_nbytes: int, what: str, peer: str) -> int:
    """Returns `nbytes`, a size that a peer named, if it lies between 0 and `most_nbytes`. Otherwise raises CommError, because
    no memory may be allocated for another size. `what`: what the peer sends."""
    if not 0 <= nbytes <= most_nbytes:
        raise CommError(f"sends {what} of {nbytes} bytes, but in this job it has at most {most_nbytes}", peer=peer,
                        code="E-SIZE")
    return nbytes
