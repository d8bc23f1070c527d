"""Members that vouch for the plan they run: whose breach is beyond doubt, and that nobody can use that against another."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from broken_kit import Cutter
from control_kit import WAIT_S, all_opened, until  # noqa: F401  (a fixture)
from test_control_serving import JOB, changed
from test_dropped_members import DATA, OTHER, WRONG_CODEC, Served
from transport_kit import soon

from commlayer import records
from commlayer.config import host_port
from commlayer.control import messages
from commlayer.control.uplink import Uplink
from commlayer.errors import CorruptFrame, PeerLost, Refused
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, key
from commlayer.transport.resumed import Resumed, Waits
from commlayer.transport.stream_transport import Settings, StreamTransport
from commlayer.transport.unanswered import Unanswered
from commlayer.transport.view_change import ViewChange, wire_generation
from commlayer.transport.vouches import DIGEST_NBYTES, Vouches, digest_of

A, B = b"a plan", b"another"
THIRD = records.encode(changed(codec="int8()"))


def said(member: int, plan: bytes, generation: int) -> Message:
    return Message(member, Header(Kind.VOUCH, generation, sender=member), memoryview(digest_of(plan)))


# ---- the law

FORCE = {
    "the coordinator's": (),
    "that of who is left of it": (("view", A, True),),
    "brought": (("plan", B, False),),
    "the coordinator's, brought": (("plan", A, False),),
    "brought with a view": (("view", B, False),),
}
"""What leads to the plan in force, from the coordinator's A."""
BEYOND = {  # by what the member has said itself: nothing, that plan, another one, that plan of the generation before
    "the coordinator's": (True, True, True, True),
    "that of who is left of it": (True, True, False, True),
    "brought": (False, True, False, False),
    "the coordinator's, brought": (False, True, False, False),
    "brought with a view": (False, True, False, False),
}


def forced(how: str) -> tuple[Vouches, bytes, int]:
    made, plan, generation = Vouches(A, 1, known=True), A, 1
    for what, plan, follows in FORCE[how]:
        generation = generation + 1 if what == "plan" else 1 << 16
        made.go_over(plan, generation, range(3), follows=follows)
    return made, plan, generation


def hears(made: Vouches, message: Message) -> None:
    """A server drops who says what nobody may."""
    try:
        made.hear(message)
    except CorruptFrame:
        assert message.header.generation == 1


@pytest.mark.parametrize("how", FORCE)
@pytest.mark.parametrize("word", range(4))
def test_whose_breach_is_beyond_doubt(how: str, word: int) -> None:
    made, plan, generation = forced(how)
    other = B if plan == A else A
    words = (None, said(1, plan, generation), said(1, other, generation), said(1, plan, generation - 1))
    for bystander in (0, 2):  # what they say changes nothing for worker 1
        hears(made, said(bystander, plan, generation))
    if (one := words[word]) is not None and one.header.generation > 0:
        hears(made, one)
    assert made.stands(1) is BEYOND[how][word]


@pytest.mark.parametrize("vouched", [True, False])
def test_who_stood_by_a_plan_stands_by_what_of_it_is_for_those_who_are_left(vouched: bool) -> None:
    made = Vouches(A, 1, known=True)
    made.go_over(B, 2, range(3), follows=False)
    if vouched:
        made.hear(said(1, B, 2))
    made.go_over(b"B for two", 1 << 16, (0, 1), follows=True)
    assert made.stands(1) is vouched
    made.hear(said(1, B, 1 << 16))
    assert not made.stands(1), "its own word counts, since it may have agreed on another plan with the others"


def test_who_comes_again_has_said_nothing() -> None:
    made = Vouches(A, 1, known=True)
    made.go_over(B, 2, range(3), follows=False)
    made.hear(said(1, B, 2))
    for generation, members in ((1 << 16, (0, 2)), (2 << 16, (0, 2, 1))):
        made.go_over(B, generation, members, follows=True)
    assert not made.stands(1)


@pytest.mark.parametrize(("generation", "nbytes"), [(1, DIGEST_NBYTES), (0, DIGEST_NBYTES), (2, 0), (2, DIGEST_NBYTES + 1)])
def test_a_word_for_nothing_is_a_breach(generation: int, nbytes: int) -> None:
    line = f"^worker 1: VOUCH of {nbytes} bytes in generation {generation}, allowed 32 bytes behind generation 1$"
    with pytest.raises(CorruptFrame, match=line):
        Vouches(A, 1, known=True).hear(said(1, A, generation)._replace(body=memoryview(bytes(nbytes))))


class Act(NamedTuple):
    """What a member with bad intent can do about plans, at its server."""

    what: str
    plan: bytes


ACTS = [Act("plan", A), Act("plan", B), Act("view", A), Act("view", B), Act("vouch", A), Act("vouch", B), Act("vouch ahead", B)]
VIEW = 1 << 16
"""The generation behind a change of members, of which there is one here."""


@pytest.mark.parametrize("honest", [1, 2])
@pytest.mark.parametrize("agreed", [2, VIEW])
def test_whatever_one_member_brings_and_vouches_for_only_itself_can_lose_by_it(honest: int, agreed: int) -> None:
    """The others go over to A or B in generation `agreed`, each by its own word: ahead of all that one does, meanwhile, behind
    it, or not yet. What they send ahead of that word is of generations that have ended, or of the coordinator's plan."""
    for acts in itertools.chain.from_iterable(itertools.product(ACTS, repeat=n) for n in range(1, 5)):
        for runs, when in itertools.product((A, B), (0, len(acts) // 2, len(acts), None)):
            made, (generation, plan), brought = Vouches(A, 1, known=True), (1, A), False
            for place, act in enumerate((*acts, None)):
                for one in range(1, 1 + honest) if place == when else ():
                    made.hear(said(one, runs, agreed))
                if act is None:
                    break
                if act.what.startswith("vouch"):
                    hears(made, said(0, act.plan, generation + (act.what == "vouch ahead")))
                elif act.what == "plan" or generation < VIEW:
                    follows = act == Act("view", plan)
                    brought = brought or not follows
                    plan, generation = act.plan, generation + 1 if act.what == "plan" else VIEW
                    made.go_over(plan, generation, range(1 + honest), follows=follows)
            spoke = when is not None and agreed == generation
            for one in range(1, 1 + honest):
                if spoke:
                    assert made.stands(one) is (plan == runs), (acts, runs, when)
                elif made.stands(one) and brought:  # by what was in force ahead of a view, which it has not gone over to
                    assert (when is None, agreed, generation, plan) == (False, 2, VIEW, runs), (acts, runs, when)
            if generation > 1 and acts[-1] == Act("vouch", plan):
                assert made.stands(0), "who vouches for what is in force answers for it"


# ---- through real connections


def under_another(opened: list[Any], tmp_path: Path) -> Served:
    """A server that worker 0 has brought another plan."""
    made = Served(opened, tmp_path / "audit.jsonl")
    assert made.switched(0, Header(Kind.PLAN, 2), OTHER) == ""
    return made


def breaks(made: Served, *words: Message, rank: int = 1) -> list[tuple[str, str]]:
    """What the coordinator hears once that worker has said those words, and then sent what is in no plan."""
    end = made.end(rank)
    for word in words:
        end.send(SERVER_BASE, word.header, word.body)
    end.send(SERVER_BASE, Header(Kind.PUSH, 2, 0, 0, codec=99, sender=rank, weight=1.0), b"")
    with pytest.raises(PeerLost):
        end.wait(end.recv(SERVER_BASE), soon())
    return [(gone.peer, gone.reason) for gone in made.serving.dropped()]


@pytest.mark.parametrize(("words", "told"), [
    ([(1, OTHER, 2)], [("worker 1", WRONG_CODEC)]),
    ([(1, DATA, 2), (1, OTHER, 2)], [("worker 1", WRONG_CODEC)]),
    ([(1, OTHER, 2), (1, DATA, 2)], []),
    ([(1, THIRD, 2)], []),
    ([(1, OTHER, 3)], []),
    ([], []),
], ids=["that one", "in the end that one", "in the end another", "another", "of another generation", "nothing"])
def test_who_has_vouched_for_the_plan_that_it_breaks_is_told_of(
        words: list[tuple[int, bytes, int]], told: list[tuple[str, str]], opened: list[Any], tmp_path: Path) -> None:
    assert breaks(under_another(opened, tmp_path), *(said(*word) for word in words)) == told


@pytest.mark.parametrize(("brought", "words", "told"), [
    (OTHER, [(1, OTHER, 2)], [("worker 1", WRONG_CODEC)]),
    (OTHER, [], []),
    (THIRD, [(1, OTHER, 2)], []),
    (THIRD, [(1, OTHER, 2), (1, THIRD, 1 + (1 << 16))], [("worker 1", WRONG_CODEC)]),
], ids=["stood by it", "did not", "another plan", "stands by that"])
def test_so_it_is_behind_a_change_of_members(
        brought: bytes, words: list[tuple[int, bytes, int]], told: list[tuple[str, str]], opened: list[Any],
        tmp_path: Path) -> None:
    made = under_another(opened, tmp_path)
    bringer, end, generation = opened[-1], made.end(1), wire_generation(made.next)
    for word in (said(*word) for word in words):
        end.send(SERVER_BASE, word.header, word.body)
    probe = Header(Kind.PROBE, 2, used=1)
    end.send(SERVER_BASE, probe)
    end.wait(end.recv(SERVER_BASE, key(probe._replace(kind=Kind.PROBE_OK))), soon())  # so all that is heard
    header = Header(Kind.PLAN, generation, flags=Flag.ABANDON)
    answer = bringer.recv(SERVER_BASE, key(header._replace(kind=Kind.PLAN_OK)))
    bringer.send(SERVER_BASE, header, msgspec.msgpack.encode(ViewChange(made.next, 7, {}, brought)))
    assert bytes(bringer.wait(answer, soon()).body) == b""
    end.send(SERVER_BASE, Header(Kind.PUSH, generation, 0, 0, codec=99, sender=1, weight=1.0), b"")
    with pytest.raises(PeerLost):
        end.wait(end.recv(SERVER_BASE), soon())
    assert [(gone.peer, gone.reason) for gone in made.serving.dropped()] == told


def test_the_word_of_others_is_nobodys_fault(opened: list[Any], tmp_path: Path) -> None:
    made = under_another(opened, tmp_path)
    bringer = opened[-1]
    for rank, end in ((0, bringer), (2, made.end(2))):
        word = said(rank, OTHER, 2)
        end.send(SERVER_BASE, word.header, word.body)
        until(lambda rank=rank: made.serving._vouches.stands(rank), f"worker {rank} is heard")  # type: ignore[misc, union-attr]
    assert breaks(made) == []


def test_a_word_that_is_lost_with_its_connection_is_said_again_ahead_of_what_rests_on_it(
        opened: list[Any], tmp_path: Path) -> None:
    """Also to a server that has forgotten it, since it was started again: the last word is kept."""
    made = under_another(opened, tmp_path)
    cutter = Cutter(host_port(made.serving.address), [])
    hello = Hello(JOB.digest(), 1, messages.digest_of(DATA), session=b"s" * 16)
    carrier = StreamTransport(hello, settings=Settings(resume=True))
    worker = Resumed(carrier, carrier, Waits(WAIT_S))
    opened.extend((cutter, worker))
    worker.connect(SERVER_BASE, lambda deadline: carrier.dial(SERVER_BASE, cutter.address, deadline), soon())
    word = said(1, OTHER, 2)
    worker.send(SERVER_BASE, word.header, word.body)
    vouches = made.serving._vouches
    assert vouches is not None
    for _ in range(2):
        until(lambda: vouches.stands(1), "worker 1 is heard")
        vouches._said.clear()
        cutter.break_all()
    worker.send(SERVER_BASE, Header(Kind.PUSH, 2, 0, 0, codec=99, sender=1, weight=1.0), b"")
    with pytest.raises(Refused, match=f"was dropped: {WRONG_CODEC}"):
        worker.wait(worker.recv(SERVER_BASE), soon())
    assert [(gone.peer, gone.reason) for gone in made.serving.dropped()] == [("worker 1", WRONG_CODEC)]


def test_of_all_that_a_worker_has_vouched_for_it_keeps_the_last_ahead_of_what_follows() -> None:
    kept: Unanswered[None] = Unanswered()
    for generation in (2, 3):
        kept.ask(Header(Kind.VOUCH, generation), digest_of(A), None)
        kept.ask(Header(Kind.PUSH, generation, 5), b"payload", None)
        kept.ask(Header(Kind.PUSH, generation, 6), b"payload", None)
    assert kept.answer(Header(Kind.RESULT, 3, 5)) is not None
    kept.end(3)
    assert [(one.header.kind, one.header.generation) for one in kept.again()] == [(Kind.VOUCH, 3), (Kind.PUSH, 3)]


def test_a_worker_tells_every_server_what_it_runs_behind_the_first_plan() -> None:
    sent: list[tuple[int, Header, bytes]] = []
    up: Any = Uplink.__new__(Uplink)
    up._membership = SimpleNamespace(view=SimpleNamespace(servers=[SimpleNamespace(id=n) for n in range(3)]))
    up.transport = SimpleNamespace(rank=4, send=lambda *one: sent.append(one))
    for up._generation in (1, 2):
        up.vouch(A)
    assert sent == [(SERVER_BASE + n, Header(Kind.VOUCH, 2, sender=4), digest_of(A)) for n in range(3)]
