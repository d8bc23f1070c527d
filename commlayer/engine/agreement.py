"""Decides in which step the remaining members of a job meet when its members change. Pure functions, without communication.

Each round has two words (messages) per member. The first word is the step that the member is in. The second word follows if all
first words name one step, or if the member completed its step before it had the others' words. The second word is binding: the
member stays in that step, or has completed it. A first word alone may be outdated when it is read.

regroup.py sends the words and carries out the result; bench/chaos builds schedules of the same decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commlayer.records import ServerInfo, View


class Vote(NamedTuple):
    """What a member sends during an epoch change."""

    step: int
    weight: float
    """The weight of its gradients in that step."""


AWAY = Vote(-2, 0.0)
"""Sent to a joining member instead of "ready": members have left at a time when the job admits no new member."""


def name_of(view: View, what: str, rank: int) -> str:
    """The key of a word in the rendezvous store."""
    return f"regroup{view.generation}/{what}/{rank}"


class VoterState(NamedTuple):
    """What a member has sent and found so far."""

    rounds_sent: tuple[int, int] = (0, 0)
    """The epoch, and the number of rounds in it for which the member has sent its words."""
    completed: int = -1
    """The step that another member has completed, so that this member will complete it, too."""
    bound: tuple[int, int] = (0, -1)
    """The epoch, and the step that the member has bound itself not to complete. A newer epoch cancels the bond: either no
    member has all such words, or all have. Otherwise other members could wait for this one without sending."""

    def gone_over(self) -> VoterState:
        """The state after an epoch change. The same step is repeated and may be aborted again."""
        return VoterState(self.rounds_sent)


class Claims(NamedTuple):
    """A word to all remaining members. The member then waits for their words under the same name."""

    what: str
    word: Vote
    ends: bool
    """Whether the wait ends as soon as this member has all data of its step."""


class AgreementOutcome(enum.Enum):
    WHOLE = enum.auto()
    """Another member has completed this member's step, so this member will complete it, too."""
    APART = enum.auto()
    """Other members are in earlier steps. They catch up, and another round follows."""
    TOGETHER = enum.auto()
    """All are in one step, and no member has completed or will complete it."""


# ---- views


def new_in(view: View, former: View) -> list[int]:
    """Members that have joined since the former view."""
    former_ranks = {m.rank for m in former.members}
    return [m.rank for m in view.members if m.rank not in former_ranks]


def gone_from(former: View, view: View) -> list[int]:
    remaining = {m.rank for m in view.members}
    return [m.rank for m in former.members if m.rank not in remaining]


def staying(former: View, view: View) -> list[int]:
    """Members that send words: those of both views, in the order of the newer one."""
    new = new_in(view, former)
    return [m.rank for m in view.members if m.rank not in new]


def told_by(mine: int, former: View, view: View) -> list[ServerInfo]:
    """The servers to which this member reports the newer view."""
    ids = [m.rank for m in view.members]
    among = len(ids) - len(new_in(view, former))
    return [server for number, server in enumerate(view.servers) if number % among == ids.index(mine)]


# ---- words


def missed(step: int, finished: Iterable[int]) -> bool:
    """Whether a member left without its part of that step. `finished`: for each member that left, the exchanges that it
    completed; -1 if it did not leave in order."""
    return any(exchanges <= step for exchanges in finished)


def calls(state: VoterState, step: int, former: View, newest: View, finished: Iterable[int], *, lets_in: bool) -> bool:
    """Whether a member that waits in that step has to send its word."""
    if step == state.completed:
        return False
    # A member that was about to join may be gone again, after some members have sent their words.
    other = new_in(newest, former) or (newest.generation != former.generation and not gone_from(former, newest))
    return missed(step, finished) or (bool(other) and lets_in)


def first(state: VoterState, view: View, mine: Vote) -> Claims:
    return Claims(f"step{_round(state, view)}", mine, not _bound(state, view, mine.step))


def second(
    state: VoterState, view: View, mine: Vote, words: Sequence[Vote], *, complete: bool,
) -> tuple[VoterState, Claims | None]:
    """`words`: the first words of all remaining members; empty if this member had all of the step before. `complete`: whether
    it has all of it now. Returns no word if members are in different steps."""
    if words and not _alike(words, mine.step):
        return state, None
    # A member that completed its step and moved on finds its old word in the next round.
    if words and not (complete and not _bound(state, view, mine.step)):
        state = state._replace(bound=(view.generation, mine.step))
    now = mine._replace(step=mine.step + (not _bound(state, view, mine.step)))
    return state, Claims(f"sure{_round(state, view)}", now, not words)


def outcome(state: VoterState, view: View, step: int, words: Sequence[Vote], sure: Sequence[Vote], finished: Iterable[int]
          ) -> tuple[VoterState, AgreementOutcome]:
    """The result of a round. `sure`: the second words; empty if there are none or this member does not wait for them."""
    if not words:
        return state._replace(completed=step), AgreementOutcome.WHOLE
    state = state._replace(rounds_sent=(view.generation, _round(state, view) + 1))
    together = _alike(words, step)
    latest = max(*(word.step for word in words), -1, *finished)
    if step < latest or (together and any(word.step > step for word in sure)):
        return state._replace(completed=step), AgreementOutcome.WHOLE
    return state, AgreementOutcome.TOGETHER if together else AgreementOutcome.APART


def _round(state: VoterState, view: View) -> int:
    of, rounds = state.rounds_sent
    return rounds if of == view.generation else 0


def _bound(state: VoterState, view: View, step: int) -> bool:
    return state.bound == (view.generation, step)


def _alike(words: Sequence[Vote], step: int) -> bool:
    return all(word.step == step for word in words)
