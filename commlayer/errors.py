"""The two classes of failure. CommError: the network or a peer failed, discard the step. ValueError and kin: a mistake to fix.

Knows nothing of sockets or torch. Everything that is neither is a bug.
"""

from __future__ import annotations


class CommError(Exception):
    """Communication failed. `peer` says with whom ("worker 2", "server 0"), so that no message leaves the reader guessing."""

    def __init__(self, what: str, *, peer: str = "", step: int | None = None, bucket: int | None = None) -> None:
        self.what, self.peer, self.step, self.bucket = what, peer, step, bucket
        place = [] if step is None else [f"step {step}"]
        place += [] if bucket is None else [f"bucket {bucket}"]
        head = ": ".join(part for part in (peer, what) if part)
        super().__init__(f"{head} ({', '.join(place)})" if place else head)

    def call(self, named: str) -> None:
        """The message then names the peer so ("worker 2 (ben)"); `peer` stays what it is."""
        text = str(self)
        if self.peer and text.startswith(self.peer) and not text.startswith(named):
            self.args = (named + text[len(self.peer):],)


class PeerLost(CommError):
    """The peer is gone: its connection ended, its heartbeats stopped, or it left the job."""


class Unsaid(PeerLost):
    """Whoever dialled has closed the connection ahead of its first byte there: it has claimed nothing."""

    def __init__(self, what: str = "closed before anything was said", *, peer: str = "") -> None:
        super().__init__(what, peer=peer)


class PeerEnded(PeerLost):
    """It closed its end in order: what it had sent has arrived."""


class StepAbandoned(CommError):
    """A worker broke a step off, so it is none on any rank: gradients are as they were, and the next step goes on."""


class DeadlineExceeded(CommError):
    """The peer may live, but did not answer in time."""


class CorruptFrame(CommError):
    """Bytes that break the format. Whoever sent them is dropped; nothing was written."""


class Disputed(CorruptFrame):
    """What does not go with what another has said: which of the two broke the protocol this end cannot know."""


class Damaged(CorruptFrame):
    """Bytes that are not those that were sent, as their checksum tells: the way may be at fault, not the peer."""


class Refused(CommError):
    """The other side answered no: another version, another job, a rank that is taken."""


class NotYet(Refused):
    """It answered no for a reason that passes."""


class RecordError(ValueError):
    """A record, plan or setting that breaks its type: one line naming the field, what was got and what is allowed."""


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
