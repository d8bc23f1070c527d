"""Defines all errors, and the table of their codes.

There are three kinds. CommError: the network or a peer failed; discard the step. InvalidInput: an argument, file or setting is
wrong. InvalidState: a call was made at the wrong time. Every other exception is a bug. Each message ends with the error's code.
Messages can change between versions; codes do not.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import ClassVar, Self

CODES: dict[str, tuple[str, str]] = {
    # The network and peers
    "E-COMM": ("Communication failed in a way that no other code names.",
               "Read the peer's log. If training had begun, restart from the last checkpoint."),
    "E-PEER-LOST": ("A peer is gone: its connection ended, its heartbeats stopped, or it left the job.",
                    "Look at the log of the peer that the message names."),
    "E-PEER-ENDED": ("A peer closed its connection normally while others still waited for its messages.",
                     "Look at the log of the peer that the message names."),
    "E-DEADLINE": ("A peer did not answer in time. It may still run.",
                   "Look at the peer that the message names, and at its link."),
    "E-STEP-ABANDONED": ("A worker abandoned a step, so no rank applied it.", "None: training continues with the next step."),
    "E-REFUSED": ("The other side refused a request.", "The message says why."),
    "E-FRAME": ("Received bytes violate the wire format. The connection is closed and nothing was written.",
                "Install the same commlayer on all machines."),
    "E-CHECKSUM": ("Received bytes differ from those that were sent.", "Check the network hardware between the machines."),
    "E-PAYLOAD": ("A received codec payload violates the codec's format.", "Install the same commlayer on all machines."),
    "E-ADDRESS": ("An address cannot be used: its form is wrong, its name has no address, its port is taken, or another "
                  "program answers there.", "Correct HOST:PORT."),
    "E-TRANSPORT-USE": ("A transport was called in a way that is not allowed.",
                        "Wait until the current call ends, or send a smaller body."),
    "E-PROCESS-GROUP": ("The process group cannot be used.", "Pass the process group that the message describes."),
    "E-COLLECTIVE": ("Ranks called different collectives, or one that is not supported between homes.",
                     "Call the same supported collectives on all ranks."),
    "E-RANKS-DIFFER": ("Ranks were given different models, optimizers or settings.", "Give all ranks the same."),
    "E-OTHER-RANK": ("A call failed on another rank, so no rank did it.", "Read the error of the rank that the message names."),
    "E-VERSION": ("The other side has another version of commlayer.", "Install the same commlayer on all machines."),
    "E-TLS": ("One end uses TLS, and the other end does not.", "Set `keys` on all machines."),
    "E-CERTIFICATE-REVOKED": ("A certificate was revoked.",
                              "Make another one with `commlayer keys invite NAME` or `commlayer keys add NAME`."),
    "E-CERTIFICATE-DATE": ("A certificate has expired, or is not valid yet.",
                           "Correct the clock, or renew the certificate with `commlayer keys add NAME --again`."),
    "E-CERTIFICATE-CA": ("A certificate was issued by another CA than the job's.",
                         "Copy the folder of keys from the job's CA."),
    "E-CERTIFICATE-KEY": ("The coordinator does not have the key of the certificate that it presents.",
                          "Check the address: another machine answers there."),
    "E-CERTIFICATE-USE": ("A node whose certificate was made with --dials-only cannot be a server.",
                          "Run the server with another node's keys."),
    "E-INVITATION": ("A home's line or its invitation is not valid.",
                     "Copy the complete line again, or make another one with `commlayer keys invite NAME`."),
    "E-INVITATION-EXPIRED": ("An invitation was not used in time.", "Make another one with `commlayer keys invite NAME`."),
    "E-INVITATION-USED": ("An invitation was used already, and works only once.",
                          "Join on the machine that used it, or make another one with `commlayer keys invite NAME --again`."),
    "E-WORKERS": ("A machine starts or expects a different number of workers than the job has.",
                  "Start the coordinator and all machines with the same number."),
    "E-RANK": ("A rank or worker number is taken already, or is outside of the job.", "Give each process its own rank."),
    "E-JOB-FULL": ("The job has all its workers.", "Wait until a worker has left."),
    "E-JOB-CLOSED": ("A running job accepts no new members, or the job is ending.", "The message says which."),
    "E-RENDEZVOUS-ENDED": ("A home left before the job began, or the coordinator was restarted.",
                           "Start all homes again; with `--min-workers` the others join again by themselves."),
    "E-QUOTA": ("A home stores too many bytes at the coordinator, or makes too many calls that wait there.",
                "Store less in torch's store."),
    "E-OWNER": ("A home tried to change a value that another home stored at the coordinator.",
                "Use another key for each writer, and count with `add` from the start."),
    "E-SIZE": ("A peer named a size that this job cannot need.", "Look at the log of the peer that the message names."),
    "E-OBJECT": ("An object cannot be sent between homes, because it is not of a plain type, or it is too large.",
                 "Send plain values, tensors or state_dict()s; with Accelerate and an IterableDataset set "
                 "dispatch_batches=False."),
    "E-REPLICAS": ("Weights, optimizer states or settings differ between ranks.",
                   "Make them equal on all ranks, or continue from a checkpoint."),
    "E-UNEQUAL-PASSES": ("A rank ended after fewer backward passes than the others.",
                         "Give all ranks the same number of batches."),
    "E-STEPS-DIFFER": ("Workers are at different steps, or did not apply the same averages.",
                       "Step, skip and clear gradients in the same way on all workers; load the same checkpoint."),
    "E-NOT-FINITE": ("Gradients or weights were not finite several times in a row.",
                     "Check the data and the learning rate; continue from a checkpoint."),
    "E-OBSERVER": ("An error in automatic planning or in a check. Training continues; if planning failed, the plan stays.",
                   "Report the traceback in the event stream. Automatic changes begin again when members change, or at the "
                   "next start."),
    # Settings and files
    "E-SETTING": ("A setting is unknown, has a wrong value, or does not fit another one.",
                  "The message names the setting, its source and what is allowed."),
    "E-SECRET": ("The job's secret is missing, too short, given twice, or differs from the job's.",
                 "Set `token_file` to a file with the job's secret."),
    "E-PLAIN-TEXT": ("Traffic would leave the machine without encryption.",
                     "Set `keys`, or allow it with COMMLAYER_INSECURE=1."),
    "E-LAUNCH-ENVIRONMENT": ("RANK, WORLD_SIZE and the like contradict each other.",
                             "Start with torchrun, or set all of them."),
    "E-KEYS": ("A certificate, key or folder of keys cannot be used.", "`commlayer keys` makes, renews and lists them."),
    "E-FILE": ("A file cannot be written.", "The message names the path and the cause."),
    "E-RECORD": ("A file or message has a field of the wrong type or with a forbidden value.",
                 "The message names the field and what is allowed."),
    "E-JOURNAL": ("The server's journal cannot be read or written.", "The message names the folder and the cause."),
    "E-JOURNAL-IN-USE": ("Another process uses the journal's folder.", "Give each server its own folder."),
    "E-SERVER-STATE": ("A server's saved codec state cannot be read.", "Load an earlier save."),
    "E-CHECKPOINT": ("A checkpoint cannot be written or loaded.", "The message names file, cause and remedy."),
    "E-TRACE": ("A trace cannot be made or read.", "Set `trace` to a file name and train some steps."),
    "E-EVENTS": ("Events cannot be read or written: there are none, the file is damaged, or it has another format.",
                 "The message says which, and what to give instead."),
    "E-CLI-OPTION": ("A command's option has a wrong value, or contradicts another one.",
                     "The message names the option and what is allowed."),
    "E-SYSTEM": ("This needs Linux.",
                 "On Windows use WSL 2. `commlayer estimate` and `commlayer plan` run anywhere."),
    "E-PACKAGE": ("A command needs a package that is not installed.", "Install the extra that the message names."),
    "E-USER-CODE": ("A script, model or task that a command loads does not do what the command needs.",
                    "The message describes what the function must return."),
    "E-ARGUMENT": ("An argument is outside of the values that a function accepts.", "The message lists what is allowed."),
    # Attaching a model
    "E-MODEL-UNSUPPORTED": ("The model has a parameter or a wrapper that commlayer does not support.",
                            "The message names it and the remedy."),
    "E-SHARDED": ("The model is sharded in a way that commlayer does not support.",
                  "Use fully_shard() over the ranks of one site; see docs/how-to/sharded-models.md."),
    "E-ATTACHED-TWICE": ("The model is already attached, so its gradients would be averaged twice.",
                         "Attach a model once, or close the other session first."),
    "E-MODEL-CHANGED": ("The model or its optimizer changed after attach().", "Attach again after the change."),
    "E-PARAMETER-LOCAL": ("An optimizer updates parameters that belong to no attached model, so each rank trains its own copy.",
                          "Attach a module that contains them, unless each rank should train its own."),
    "E-JOIN-ATTACH": ("A session attached in this way cannot join a running job.",
                      "Use attach(model, optimizer) under `commlayer join`."),
    "E-JOIN-STATE": ("The state of a running job does not fit this model or optimizer.",
                     "The message names which part of the state."),
    "E-JOB-ENDED": ("The job ended before this home had joined it.", "Nothing: `commlayer join` joins again by itself."),
    "E-JOIN-MISSED": ("The job has continued without a home that was joining.",
                      "Nothing: `commlayer join` joins again by itself."),
    "E-DDP-HOOK": ("A HookState is used with more than one module.", "Create one HookState per module."),
    "E-DDP-UNSUPPORTED": ("attach() does not support this use of DistributedDataParallel.",
                          "The message names what to change."),
    "E-HOOKS-TAKEN": ("A hook removed a gradient before backward() returned, so it has no average.",
                      "Step after backward()."),
    "E-FORKED": ("A session was used in a forked child of the process that called attach().",
                 "Use the session in the process that attached the model."),
    "E-SESSION-CLOSED": ("The session is closed.", "Attach again."),
    # Gradients and steps
    "E-GRADIENT-LOCAL": ("An optimizer is about to apply a gradient that was not averaged.",
                         "Average it first: backward(), or synchronize()."),
    "E-GRADIENT-CHANGED": ("A gradient changed inside backward() after it was passed on to be averaged.",
                           "Change it in a hook on its own parameter, or after backward()."),
    "E-GRADIENT-LAYOUT": ("A gradient has a layout that cannot be averaged.", "Use dense gradients."),
    "E-GRADIENT-PENDING": ("A gradient was read before its average arrived.",
                           "Read it after the optimizer's step, or use sync=\"step\"."),
    "E-GRADIENT-TWICE": ("A gradient became final twice, or one backward pass began inside another.",
                         "The message names which pass or argument to change."),
    "E-STEP-IN-BACKWARD": ("An optimizer steps inside the backward pass.", "Step after backward()."),
    "E-COMPILED": ("Backward runs under compiled autograd, which has no gradient hooks.",
                   "Compile the model, not the backward pass."),
    "E-WEIGHT": ("The weight of a step is invalid.", "Give a finite number, 0 or more."),
    "E-CLIP": ("clip_grad_norm cannot clip these gradients.", "The message names another place to clip."),
    "E-CALLS-DIFFER": ("Ranks made different calls, for example session.join() on some ranks only.",
                       "Make the same calls on all ranks, in the same order."),
    "E-UNEVEN-INPUTS": ("session.join() does not work in this job, or a call is not allowed inside it.",
                        "The message lists what is allowed."),
    # Sync modes
    "E-SYNC-MODE": ("The argument `sync` is none of the sync modes, or does not fit the plan.",
                    "The message lists what is allowed."),
    "E-SYNC-EVERY": ("`every` is not a whole number of steps.", "Give 1 or more."),
    "E-SYNC-FRAGMENTS": ("`fragments` does not divide `every`, or the plan has fewer buckets.",
                         "Give a smaller divisor of `every`."),
    "E-SYNC-FORWARD": ("sync=\"forward\" does not work with this model or optimizer.", "Use sync=\"step\"."),
    "E-SYNC-OPTIMIZER": ("Local steps do not work with this optimizer.", "The message names one that works."),
    "E-SYNC-PLAN": ("The plan has another sync mode than the argument `sync`.", "Omit `sync`, or use another plan."),
    # Plans
    "E-PLAN-NAME": ("`plan` is neither a Plan nor a plan file, or was given together with `compression`.",
                    "Give a Plan, a file or a codec."),
    "E-PLAN-FILE": ("A plan file cannot be read, or belongs to another model.", "`commlayer plan create` writes one."),
    "E-PLAN-INPUT": ("A model, cluster or policy for planning is wrong.", "The message names the field and what is allowed."),
    "E-PLAN-REFUSED": ("The plan does not fit this job or its servers.", "Create a plan for this job."),
    "E-PLANNER-ENDED": ("The planner's process has ended.", "None: the next search starts another process."),
    "E-PLAN-LATE": ("A bucket's results are one step late, and its codec sends at most 1 % of the entries. No measured "
                    "training covers this.", "Send more than 1 %, or make the plan without staleness."),
    "E-PLAN-MEMORY": ("By an estimate, a training does not fit into a GPU's memory, even with the smallest micro-batches.",
                      "Use a GPU with more memory, or what the message names."),
    "E-PLAN-SWITCH": ("The job cannot switch to this plan now.", "Switch between two steps, at the same step on all ranks."),
    "E-PLAN-PATH": ("A bucket's path is invalid.", "The message names which operations are allowed."),
    "E-PLAN-BY-NODE": ("The codecs of one bucket on different nodes cannot be summed together.",
                       "Let only their ratios differ."),
    "E-PLAN-CODEC-COST": ("A codec has no measured or built-in cost.", "Measure it with `commlayer profile`."),
    "E-PLAN-QUESTION": ("An argument of explain, diff or whatif does not fit the plan.", "The message lists what is allowed."),
    "E-PLAN-DATA": ("A table of machines, links, codecs or models in the package cannot be used.", "Install commlayer again."),
    "E-GPU-NAME": ("A GPU is unknown.", "Use a name from the message, or measure with `commlayer profile`."),
    "E-LINK-NAME": ("A link's name or rate is wrong.", "Use a name from the message."),
    "E-MODEL-NAME": ("A built-in model's name or batch is wrong.", "Use a name from the message."),
    "E-LEARNING-TABLE": ("A table of measured convergence factors cannot be used.",
                         "`python -m bench.own_learning TASK FILE` writes one."),
    "E-LOSS-MODEL": ("A loss model cannot be read, or lacks a codec.", "`commlayer tune` writes one."),
    "E-EPOCH": ("A joining worker was reported to a server under a wrong number.", "This is a bug in commlayer: report it."),
    "E-EPOCH-ENDED": ("A worker is no longer a member of the job.",
                      "Nothing: `commlayer join` joins the running job again by itself."),
    # Codecs
    "E-CODEC-NAME": ("A codec's name or the form of its arguments is wrong.", "Use a name from docs/reference/codecs.md."),
    "E-CODEC-ARGUMENT": ("A codec's argument is wrong, or codecs do not nest this way.", "The message lists what is allowed."),
    "E-CODEC-INPUT": ("A codec was given memory of the wrong size, type or device.",
                      "Give contiguous float32 of the bucket's size."),
    "E-CODEC-STATE": ("Saved codec state does not fit.", "Load it under the plan that it was saved with."),
    "E-CODEC-BACKEND": ("A codec backend is not available.", "Use one that the message names."),
    "E-GPU-CODE": ("GPU code cannot be loaded.", "Install the extra gpu12 or gpu13."),
    # Samplers, shares and tuning
    "E-SAMPLER-ARGUMENT": ("A sampler was given a wrong argument.", "The message lists what is allowed."),
    "E-SAMPLER-FOLLOW": ("A data loader cannot follow a sampler that changes its batches.",
                         "The message names a loader that can."),
    "E-SAMPLER-RANKS": ("The samplers of the ranks differ where they must be equal.",
                        "Give each rank its own sampler, with the same batch."),
    "E-SAMPLER-STATE": ("A sampler's saved state does not fit.", "Create the sampler with the arguments of the saved one."),
    "E-SHARES-ARGUMENT": ("Batch shares are not possible.", "The message lists what is allowed."),
    "E-TIME-MODEL": ("The measured step times do not fit the time model.", "Remove the measurement that the message names."),
    "E-TUNE-ARGUMENT": ("A tuning range is wrong.", "Give a range above 0."),
    "E-TUNE-BASELINE": ("The uncompressed baseline trial of a search failed.", "Correct the task; its message is included."),
    "E-TUNE-STORE": ("A store of trials belongs to another search.", "Give another --store, or delete the store."),
    # Optimizers
    "E-OPTIM-ARGUMENT": ("An optimizer's argument is wrong.", "The message lists what is allowed."),
    "E-OPTIM-GRADIENT": ("A sparse gradient has wrong positions.", "The message names the parameter."),
    "E-OPTIM-STATE": ("A saved optimizer state does not fit.", "The message names which part of it."),
    "E-OPTIM-PARAMETER": ("An optimizer does not support a parameter.", "Use another optimizer for that parameter."),
}
"""Meaning and remedy of each error code. docs/generate.py writes docs/reference/errors.md from this table."""

_CODE = re.compile(rf" ?\[({'|'.join(CODES)})\]")
GENERIC = ("", "E-RECORD")
"""Unspecific codes. If a text quotes an error with one of these codes, the new error keeps its own code instead of the quoted
one."""


class Coded(Exception):
    """An error with a code. If the text quotes another coded error, the new error takes that code, which is more specific."""

    def __init__(self, code: str, text: str) -> None:
        inner = code_of(text)
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


def line_of(error: Exception) -> str:
    """The line that a command prints for an error that the user can correct. For an OSError without a file name, the line is
    only the system's description."""
    return error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)


def cause_of(error: BaseException) -> str:
    r"""The reason that is sent to other ranks when an exception ends a script: the exception's class and the first line of its
    text. A pause ends it with KeyboardInterrupt, whose text is the reason.

    >>> cause_of(KeyboardInterrupt()), cause_of(ValueError("no room\\nfor it")), cause_of(KeyboardInterrupt("pauses"))
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
    code = code_of(text)
    room = most - len(coded(code, "")) if code else most
    line = one_line(without_code(text)[: room + 1])
    line = line if len(line) <= room else f"{line[: room - 3]}..."
    return coded(code, line) if code else line


def listed(names: Sequence[str], most: int) -> str:
    """Joins at most `most` names, and says how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def code_of(text: object) -> str:
    """The first error code in a text or in an error's message; "" if there is none.

    >>> code_of("peer: no answer [E-DEADLINE]")
    'E-DEADLINE'
    """
    match = _CODE.search(str(text))
    return match[1] if match else ""


def coded(code: str, text: str) -> str:
    """Appends a code to the text of a refusal. The process that receives the text raises an error with this code.

    >>> Refused(coded("E-RANK", "rank 1 is taken")).code
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
