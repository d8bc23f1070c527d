"""Messages of members during an epoch change, also while the coordinator is unreachable."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from commlayer.cluster.processes import site_process_group
from commlayer.engine.epochs.agreement import Vote
from commlayer.engine.epochs.epoch_messages import EpochMessages, NewerEpoch
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Epoch, Member

EPOCH = Epoch(2, (Member(0, 0, "a", 1), Member(7, 1, "b", 2)), ())
AWAY = PeerLost("not reachable: refused", peer="coordinator 10.99.0.1:7000"), \
    DeadlineExceeded("no answer within 5.0 s", peer="coordinator 10.99.0.1:7000")


class Desk:
    """Raises these, one after the other, and then answers."""

    def __init__(self, *errors: CommError, act: Callable[[], None] = lambda: None) -> None:
        self.errors, self.puts, self._act = list(errors), list[Any](), act

    def request(self, deadline: float, **wanted: Any) -> Any:
        self.puts.append(wanted.get("put", ()))
        if self.errors:
            error = self.errors.pop(0)
            self._act()
            raise error
        return SimpleNamespace(values=[msgspec.msgpack.encode((5,)) for _ in wanted["want"]])


def told(desk: Desk, words: EpochMessages, monkeypatch: pytest.MonkeyPatch) -> list[Vote]:
    monkeypatch.setattr(site_process_group, "kv_client", lambda: desk)
    return words.exchange_votes(EPOCH, "step0", 7, Vote(5), time.monotonic() + 30.0)


def test_unanswered_vote_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted coordinator knows which votes it has answered."""
    desk = Desk(*AWAY, AWAY[0])
    assert told(desk, EpochMessages(EPOCH, 0.0, 20.0), monkeypatch) == [Vote(5)] * 2
    assert all(put and put == desk.puts[0] for put in desk.puts)


@pytest.mark.parametrize("error", [PeerLost("no heartbeat", peer="worker 0"), CommError("dead", peer="coordinator x")])
def test_answered_vote_is_not_sent_again(error: CommError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommError) as caught:
        told(Desk(error), EpochMessages(EPOCH, 0.0, 20.0), monkeypatch)
    assert caught.value is error


@pytest.mark.parametrize("result", [True, False])
def test_only_an_answer_decides_whether_a_superseded_epoch_was_committed(
        result: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one member could discard an epoch that all others have entered, with a site that joined in it."""
    words = EpochMessages(EPOCH, 0.0, 20.0)
    desk = Desk(AWAY[0], act=lambda: setattr(words, "newest", Epoch(3, EPOCH.members, ())))
    if result:
        assert told(desk, words, monkeypatch) == [Vote(5)] * 2
    else:
        monkeypatch.setattr(msgspec.msgpack, "encode", lambda _: None)
        with pytest.raises(NewerEpoch):
            told(desk, words, monkeypatch)


def test_unreachable_coordinator_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match="not reachable.*E-PEER-LOST"):
        told(Desk(AWAY[0]), EpochMessages(EPOCH, 0.0, 0.0), monkeypatch)
