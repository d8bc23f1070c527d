"""Errors, and the table of their codes.

There are three kinds. CommError: the network or a peer failed; discard the step. InvalidInput: an argument, file or setting is
wrong. InvalidState: a call came at the wrong time. Every other exception is a bug. Each message ends with the error's code.
Messages may change; codes do not.
"""

from __future__ import annotations

import copy
import re
from typing import ClassVar, Self

CODES: dict[str, tuple[str, str]] = {
    # ---- the network and peers
    "E-COMM": ("Communication failed in a way that no other code names.", "Restart from the last checkpoint."),
    "E-PEER-LOST": ("A peer is gone: its connection ended, its heartbeats stopped, or it left the job.",
                    "Look at the log of the peer that the message names."),
    "E-DEADLINE": ("A peer did not answer in time. It may still run.",
                   "Look at the peer that the message names, and at its link."),
    "E-STEP-ABANDONED": ("A worker abandoned a step, so no rank applied it.", "Nothing: the next step goes on."),
    "E-REFUSED": ("The other side refused a request.", "The message says why."),
    "E-FRAME": ("Received bytes break the wire format. The connection is closed and nothing was written.",
                "Install the same commlayer on all machines."),
    "E-CHECKSUM": ("Received bytes differ from those that were sent.", "Check the network hardware between the machines."),
    "E-PAYLOAD": ("A received codec payload breaks the codec's format.", "Install the same commlayer on all machines."),
    # ---- arguments and files
    "E-ARGUMENT": ("An argument is outside of what the function takes.", "The message says what is allowed."),
    "E-RECORD": ("A record, plan or setting breaks its type.", "The message names the field and what is allowed."),
    "E-FILE": ("A file or folder cannot be read or written.", "The message names the path and the cause."),
    "E-STATE": ("The call comes at a time at which it has no meaning.", "The message says what must come first."),
}
"""By code: what it means, and what a user can do. docs/reference/errors.md is made from it (`page`)."""

_CODE = re.compile(r" ?\[(E-[A-Z0-9-]+)\]")


class Coded(Exception):
    """An error with a code. Where the text quotes another coded error, that error's code is kept: it is more specific."""

    default_code: ClassVar[str]

    def __init__(self, code: str, text: str) -> None:
        inner = _CODE.search(text)
        self.code = inner[1] if inner else code
        self.what = _CODE.sub("", text)
        super().__init__(code, text)

    def __str__(self) -> str:
        return f"{self.what} [{self.code}]"


class InvalidInput(Coded, ValueError):
    """An argument, file or setting is wrong: one line says what it is, what is allowed and how to mend it."""


class RecordError(InvalidInput):
    """A record, plan or setting that breaks its type."""

    def __init__(self, text: str, code: str = "E-RECORD") -> None:
        super().__init__(code, text)
        self.args = (text, code)


class InvalidState(Coded, RuntimeError):
    """A call at the wrong time."""


class CommError(Coded):
    """Communication failed. `peer` says with whom ("worker 2", "server 0"), so that no message leaves the reader guessing."""

    default_code = "E-COMM"

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
        return f"{head} ({', '.join(place)}) [{self.code}]" if place else f"{head} [{self.code}]"

    def located(self, *, what: str | None = None, peer: str | None = None, step: int | None = None,
                bucket: int | None = None) -> Self:
        """A copy with another text, peer or place; what is None stays as it is."""
        other = copy.copy(self)
        for name, value in (("what", what), ("peer", peer), ("step", step), ("bucket", bucket)):
            if value is not None:
                setattr(other, name, value)
        return other

    def call(self, named: str) -> None:
        """The message then names the peer so ("worker 2 (ben)"); `peer` stays what it is."""
        self._named = named if self.peer else ""


class PeerLost(CommError):
    """The peer is gone: its connection ended, its heartbeats stopped, or it left the job."""

    default_code = "E-PEER-LOST"


class Unsaid(PeerLost):
    """Whoever dialled has closed the connection ahead of its first byte there: it has claimed nothing."""

    def __init__(self, what: str = "closed before anything was said", *, peer: str = "") -> None:
        super().__init__(what, peer=peer)


class PeerEnded(PeerLost):
    """It closed its end in order: what it had sent has arrived."""


class StepAbandoned(CommError):
    """A worker broke a step off, so it is none on any rank: gradients are as they were, and the next step goes on."""

    default_code = "E-STEP-ABANDONED"


class DeadlineExceeded(CommError):
    """The peer may live, but did not answer in time."""

    default_code = "E-DEADLINE"


class CorruptFrame(CommError):
    """Bytes that break the format. Whoever sent them is dropped; nothing was written."""

    default_code = "E-FRAME"


class Disputed(CorruptFrame):
    """What does not go with what another has said: which of the two broke the protocol this end cannot know."""


class Damaged(CorruptFrame):
    """Bytes that are not those that were sent, as their checksum tells: the way may be at fault, not the peer."""

    default_code = "E-CHECKSUM"


class Refused(CommError):
    """The other side answered no: another version, another job, a rank that is taken."""

    default_code = "E-REFUSED"


class NotYet(Refused):
    """It answered no for a reason that passes."""


def line_of(error: Exception) -> str:
    """What a command says of one that users can mend. The system's own have a number in front, unless they name a file."""
    return error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)


def cause_of(error: BaseException) -> str:
    """What the others hear of an exception that ended a script here: its kind, and the first line that it has, if any.

    >>> cause_of(KeyboardInterrupt()), cause_of(ValueError("no room\\nfor it"))
    ('KeyboardInterrupt', 'ValueError: no room')
    """
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def one_line(text: object) -> str:
    """What others may have written, fit for an error or a log: a stranger's line break would make lines that nobody logged."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def short_line(text: object, most: int) -> str:
    """The same, of so many characters at most: what others write may be as long as a call.

    >>> short_line("not\nmore than this", 12)
    'not\\nmore...'
    """
    line = one_line(str(text)[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def code_of(text: object) -> str:
    """The first code in a text, or of an error; "" if there is none.

    >>> code_of("peer: no answer [E-DEADLINE]")
    'E-DEADLINE'
    """
    match = _CODE.search(str(text))
    return match[1] if match else ""


def page() -> str:
    """docs/reference/errors.md."""
    rows = [f"| `{code}` | {meaning} | {remedy} |" for code, (meaning, remedy) in CODES.items()]
    return "\n".join((
        "# Error codes", "",
        "Every error message ends with a code in brackets, such as `[E-DEADLINE]`. Messages may change; codes do not.", "",
        "In Python, `error.code` holds the code. Errors of the network are `commlayer.errors.CommError`. Errors of arguments,",
        "files and settings are `ValueError`. Calls at the wrong time are `RuntimeError`. A command that fails with one of",
        "them prints one line and ends with exit code 2.", "",
        "| code | meaning | remedy |", "| --- | --- | --- |", *rows, ""))
