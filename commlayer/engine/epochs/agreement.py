"""Decides in which step the remaining members continue after the members of a job have changed. Pure functions, without
communication.

In each round of votes, each member sends up to two votes. The first vote is the step that the member is in. The second vote
follows if all first votes name the same step, or if the member completed its step before it received the other votes. The
second vote is binding: the member stays in that step, or has completed it. A first vote can be outdated when another member
reads it.

epoch_messages.py sends the votes and carries out the result; tests/sim tests these functions with generated schedules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commlayer.cluster.calls.messages import StoreKey
from commlayer.records import Epoch, ServerInfo


class Vote(NamedTuple):
    """A message that a member sends during an epoch change: the step that it is in."""

    step: int


AWAY = Vote(-2)
"""Vote that tells a joining member that it cannot join now, because other members have left at a time when the job admits no
new member."""


def key_of(epoch: Epoch, what: str, rank: int) -> StoreKey:
    """Returns the key of a vote in the rendezvous store: the epoch with the kind and round of the vote (`what`), and the rank
    of the voter."""
    return f"regroup{epoch.generation}/{what}", rank


class VoterState(NamedTuple):
    """Record of what a member has sent and learned so far, during changes of members."""

    rounds_sent: tuple[int, int] = (0, 0)
    """The epoch's generation, and the number of rounds of this epoch in which the member has sent its votes."""
    completed: int = -1
    """The step that another member is known to have completed, so that this member will complete it, too; -1: none."""
    bound: tuple[int, int] = (0, -1)
    """The epoch's generation, and the step that this member has promised not to complete. A newer epoch cancels the promise,
    because a member that keeps an old promise might let the others wait for its data."""

    def entered(self) -> VoterState:
        """Returns the state after an epoch change. Promises are cancelled: the same step is repeated and might be aborted
        again."""
        return VoterState(self.rounds_sent)


class Claims(NamedTuple):
    """A vote to send to all remaining members. The sender then waits for the votes of the same kind from all of them."""

    what: str
    vote: Vote
    ends: bool
    """True: the wait for other votes ends as soon as this member has received all data of its step."""


class AgreementOutcome(enum.Enum):
    WHOLE = enum.auto()
    """Another member has completed the step of this member, so this member will complete it, too."""
    APART = enum.auto()
    """Some members are in earlier steps. They catch up, and another round of votes follows."""
    TOGETHER = enum.auto()
    """All members are in the same step, and no member has completed or will complete it."""


def new_in(epoch: Epoch, former: Epoch) -> list[int]:
    """Returns the ranks of the members that have joined since the epoch `former`."""
    former_ranks = {m.rank for m in former.members}
    return [m.rank for m in epoch.members if m.rank not in former_ranks]


def departed_from(former: Epoch, epoch: Epoch) -> list[int]:
    remaining = {m.rank for m in epoch.members}
    return [m.rank for m in former.members if m.rank not in remaining]


def staying(former: Epoch, epoch: Epoch) -> list[int]:
    """Returns the ranks of the members that vote: the members of both epochs, in the order of the newer epoch."""
    new = new_in(epoch, former)
    return [m.rank for m in epoch.members if m.rank not in new]


def servers_to_notify(mine: int, former: Epoch, epoch: Epoch) -> list[ServerInfo]:
    """Returns the servers to which the member with rank `mine` must report the new epoch. The members of both epochs share the
    servers among themselves."""
    ids = [m.rank for m in epoch.members]
    among = len(ids) - len(new_in(epoch, former))
    return [server for number, server in enumerate(epoch.servers) if number % among == ids.index(mine)]


def missed(step: int, finished: Iterable[int]) -> bool:
    """Returns True if a member left without sending its gradients of `step`. `finished`: for each member that left, the number
    of exchanges that it completed; -1 after an unannounced leave."""
    return any(exchanges <= step for exchanges in finished)


def calls(state: VoterState, step: int, former: Epoch, newest: Epoch, finished: Iterable[int], *, lets_in: bool) -> bool:
    """Returns True if a member that waits in `step` must send its first vote now. `lets_in`: True if the job currently admits
    new members."""
    if step == state.completed:
        return False
    # A member that was about to join can leave again after some members have sent their votes.
    other = new_in(newest, former) or (newest.generation != former.generation and not departed_from(former, newest))
    return missed(step, finished) or (bool(other) and lets_in)


def first(state: VoterState, epoch: Epoch, mine: Vote) -> Claims:
    return Claims(f"step{_round(state, epoch)}", mine, not _bound(state, epoch, mine.step))


def second(
    state: VoterState, epoch: Epoch, mine: Vote, first_votes: Sequence[Vote], *, complete: bool,
) -> tuple[VoterState, Claims | None]:
    """Returns the state and the second vote of a member. `first_votes`: those of all members; empty if this member received all
    data of its step before the votes. `complete`: True if it has all data now. The vote is None if members are in different
    steps."""
    if first_votes and not _alike(first_votes, mine.step):
        return state, None
    # If a member completed its step and moved on, its first vote here is outdated; the next round has a newer one.
    if first_votes and not (complete and not _bound(state, epoch, mine.step)):
        state = state._replace(bound=(epoch.generation, mine.step))
    now = mine._replace(step=mine.step + (not _bound(state, epoch, mine.step)))
    return state, Claims(f"sure{_round(state, epoch)}", now, not first_votes)


def outcome(
    state: VoterState, epoch: Epoch, step: int, first_votes: Sequence[Vote], second_votes: Sequence[Vote],
    finished: Iterable[int],
) -> tuple[VoterState, AgreementOutcome]:
    """Returns the state and the result of a round of votes. `second_votes`: empty if there are none, or if this member does not
    wait for them."""
    if not first_votes:
        return state._replace(completed=step), AgreementOutcome.WHOLE
    state = state._replace(rounds_sent=(epoch.generation, _round(state, epoch) + 1))
    together = _alike(first_votes, step)
    latest = max(*(vote.step for vote in first_votes), -1, *finished)
    if step < latest or (together and any(vote.step > step for vote in second_votes)):
        return state._replace(completed=step), AgreementOutcome.WHOLE
    return state, AgreementOutcome.TOGETHER if together else AgreementOutcome.APART


def _round(state: VoterState, epoch: Epoch) -> int:
    of, rounds = state.rounds_sent
    return rounds if of == epoch.generation else 0


def _bound(state: VoterState, epoch: Epoch, step: int) -> bool:
    return state.bound == (epoch.generation, step)


def _alike(first_votes: Sequence[Vote], step: int) -> bool:
    return all(vote.step == step for vote in first_votes)
