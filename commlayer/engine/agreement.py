"""In which step those who are left come to stand: decisions over what a member knows and what others said. Does nothing itself.

In each round a member says twice where it stands. First in which step it is. Where all words name one step, or where it has all
of its step before the others have spoken, then for good whether it stays in that step or has it whole: a first word may be old
when it is read. regroup.py carries the words, and does what is found; bench/chaos makes schedules of the same decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commlayer.records import ServerInfo, View


class Word(NamedTuple):
    """What a member says where the view changes."""

    step: int
    weight: float
    """Of its gradients in that step."""


AWAY = Word(-2, 0.0)
"""In place of "ready", to who joins: members have gone where nobody can be let in."""


def name_of(view: View, what: str, rank: int) -> str:
    """Under which it stands in the store of the meeting."""
    return f"regroup{view.generation}/{what}/{rank}"


class Standing(NamedTuple):
    """What a member has said and found so far."""

    told: tuple[int, int] = (0, 0)
    """Of which view, in how many rounds it has said where it stands."""
    whole: int = -1
    """The step that somebody has whole, so that this one will."""
    bound: tuple[int, int] = (0, -1)
    """Of which view, the step that it has said in that not to have, for good. Where there is a newer view nobody has found all
    such words, or all have, so it holds no longer: others may wait for this one where they say nothing."""

    def gone_over(self) -> Standing:
        """The same step is done again, and may break off again."""
        return Standing(self.told)


class Says(NamedTuple):
    """What a member says to all who stay, whose words under the same name it then waits for."""

    what: str
    word: Word
    ends: bool
    """Whether it waits no longer once all of its step is here."""


class Found(enum.Enum):
    WHOLE = enum.auto()
    """Somebody has this member's step whole, and so will it."""
    APART = enum.auto()
    """Others are behind: once they have come they say so, in another round."""
    TOGETHER = enum.auto()
    """All stand in one step, and nobody has it whole or ever will."""


# ---- views


def new_in(view: View, former: View) -> list[int]:
    """Who has joined since."""
    known = {m.rank for m in former.members}
    return [m.rank for m in view.members if m.rank not in known]


def gone_from(former: View, view: View) -> list[int]:
    left = {m.rank for m in view.members}
    return [m.rank for m in former.members if m.rank not in left]


def staying(former: View, view: View) -> list[int]:
    """Who has words to say: members of both, in the order of the newer."""
    new = new_in(view, former)
    return [m.rank for m in view.members if m.rank not in new]


def told_by(mine: int, former: View, view: View) -> list[ServerInfo]:
    """The servers that this member tells of the newer one."""
    ids = [m.rank for m in view.members]
    among = len(ids) - len(new_in(view, former))
    return [server for number, server in enumerate(view.servers) if number % among == ids.index(mine)]


# ---- words


def missed(step: int, finished: Iterable[int]) -> bool:
    """Whether somebody has gone without its part of that step. `finished`: in how many exchanges each who has gone has done its
    part; -1 if it did not leave in order."""
    return any(done <= step for done in finished)


def calls(standing: Standing, step: int, former: View, newest: View, finished: Iterable[int], *, lets_in: bool) -> bool:
    """Whether a member that waits in that step has to say where it stands."""
    if step == standing.whole:
        return False
    # Who was to be let in may be gone again, and some have begun to speak of it.
    other = new_in(newest, former) or (newest.generation != former.generation and not gone_from(former, newest))
    return missed(step, finished) or (bool(other) and lets_in)


def first(standing: Standing, view: View, mine: Word) -> Says:
    return Says(f"step{_round(standing, view)}", mine, not _bound(standing, view, mine.step))


def second(standing: Standing, view: View, mine: Word, words: Sequence[Word], *, here: bool) -> tuple[Standing, Says | None]:
    """`words`: the first of all who stay, none if all of the step was here before. `here`: whether it is now. None: not all
    stand in one step, and there is nothing to say for good."""
    if words and not _alike(words, mine.step):
        return standing, None
    # Whoever has left with its step whole finds its old word in the next round, and goes on to another one.
    if words and not (here and not _bound(standing, view, mine.step)):
        standing = standing._replace(bound=(view.generation, mine.step))
    now = mine._replace(step=mine.step + (not _bound(standing, view, mine.step)))
    return standing, Says(f"sure{_round(standing, view)}", now, not words)


def found(standing: Standing, view: View, step: int, words: Sequence[Word], sure: Sequence[Word], finished: Iterable[int]
          ) -> tuple[Standing, Found]:
    """At the end of a round. `sure`: the second words, none where there are none, or this member does not wait for them."""
    if not words:
        return standing._replace(whole=step), Found.WHOLE
    standing = standing._replace(told=(view.generation, _round(standing, view) + 1))
    together = _alike(words, step)
    most = max(*(word.step for word in words), -1, *finished)
    if step < most or (together and any(word.step > step for word in sure)):
        return standing._replace(whole=step), Found.WHOLE
    return standing, Found.TOGETHER if together else Found.APART


def _round(standing: Standing, view: View) -> int:
    of, rounds = standing.told
    return rounds if of == view.generation else 0


def _bound(standing: Standing, view: View, step: int) -> bool:
    return standing.bound == (view.generation, step)


def _alike(words: Sequence[Word], step: int) -> bool:
    return all(word.step == step for word in words)
