"""Around a step the same things happen in the same order, whether gradients come from hooks or from DDP."""

from __future__ import annotations

import functools

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play
from support.rank_pool import pool, quick

import commlayer
from commlayer.engine.observers import Observer, ObserverOrder, Observers

WORLD = 2
PLACES = (ObserverOrder.CONTROLLER, ObserverOrder.TRACE, ObserverOrder.OTHER)


def watched(run: Run) -> list[tuple[str, int, int]]:
    """Who was called in the second step, when, and how many steps were committed then. Rank 1 adds its observers backwards."""
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    wrapped(torch.ones(2, 12)).sum().backward()
    seen: list[tuple[str, int, int]] = []

    def note(moment: str, place: ObserverOrder) -> None:
        seen.append((moment, place, session.inspect.connection.exchanges))

    observers = session.inspect.observers
    for place in sorted(PLACES, reverse=run.rank == 1):
        moments = ("before_commit", "after_step", "after_exchange")
        observers.add(Observer(place, place, **{moment: functools.partial(note, moment, place) for moment in moments}))
    wrapped(torch.ones(2, 12)).sum().backward()
    return seen


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_observers_are_called_by_their_places_before_and_after_the_commit(how: str) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        seen = pool(WORLD).call(play, WORLD, watched, Setting(how, (jobs[0].address,)))
    assert seen == [[("before_commit", place, 1) for place in PLACES] + [("after_step", place, 2) for place in PLACES]] * WORLD


def compared(rank: int, fails: bool) -> tuple[list[float], str]:
    """Gradients after a step whose sum an observer has seen, and the error that it ended with."""
    model = torch.nn.Linear(2, 1, bias=False)
    error = ""

    def broken() -> None:
        if fails:
            raise ValueError("it does not compare")

    with commlayer.attach(model, config=quick(ranks_per_node=WORLD)) as session:
        session.inspect.observers.add(Observer(ObserverOrder.OTHER, broken, before_commit=broken))
        try:
            model(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
        except ValueError as raised:
            error = str(raised)
    assert model.weight.grad is not None
    return model.weight.grad.view(-1).tolist(), error


def test_nothing_is_written_before_observers_have_seen_the_sums() -> None:
    ranks = pool(WORLD)
    assert ranks.call(compared, False) == [([2.0, 2.0], "")] * WORLD
    assert ranks.call(compared, True) == [([own, own], "it does not compare") for own in (1.0, 3.0)]


def test_who_is_added_or_removed_in_a_round_counts_from_the_next_on() -> None:
    observers, called = Observers(), []

    def first() -> None:
        called.append("first")
        observers.remove(first)
        observers.add(Observer(ObserverOrder.CONTROLLER, later, later))

    def later() -> None:
        called.append("later")

    observers.add(Observer(ObserverOrder.TRACE, first, first))
    for _ in range(2):
        for observer in observers:
            observer.after_step()
    assert called == ["first", "later"]
    assert [observers.at(place) for place in (ObserverOrder.CONTROLLER, ObserverOrder.TRACE)] == [[later], []]


def test_a_session_has_what_is_needed_every_day_and_the_rest_under_inspect() -> None:
    session = commlayer.attach(mlp())
    public = {name for name in {*dir(session), *vars(session)} if not name.startswith("_")}
    assert len(public) <= 18
    assert {"no_sync", "synchronize", "weight", "checkpoint", "resume", "metrics", "close",
            "inspect"} <= public
    rest = {name for name in dir(session.inspect) if not name.startswith("_")}
    assert rest == {"plan", "connection", "observers", "decisions", "events", "laps", "trace", "members", "may_leave",
                    "own", "carried", "parted", "catch_up", "followers", "given"}
    session.close()
