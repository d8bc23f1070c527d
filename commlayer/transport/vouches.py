"""Whether a member stands by the plan that its server sums by, so that what it breaks is its own fault. Knows digests; no plan.

Of a change of plans a server hears by one member alone, who may bring what the others do not know. So each member says for
itself which plan it runs, ahead of all else that it sends under that. Who is held against its own word is not wronged by
another's, and who vouches falsely alone answers for it. That others vouch for a plan, however many, tells nothing of who does
not: a member that deals out plans may have dealt it another one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection

from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import Message, peer_name

FIRST = 1
"""The generation of the coordinator's own plan, to which all greetings were held: nobody has to vouch for that."""
DIGEST_NBYTES = hashlib.sha256().digest_size


def digest_of(plan: bytes) -> bytes:
    """What is vouched for, from the canonical bytes. Whole: of a shorter one somebody could find two plans."""
    return hashlib.sha256(plan).digest()


class Vouches:
    """Of one server. Any thread may call it."""

    def __init__(self, plan: bytes, generation: int, *, known: bool) -> None:
        """In force from now on. `known`: that is the coordinator's plan."""
        self._lock = threading.Lock()
        self._plan, self._known = (generation, digest_of(plan)), known
        self._said: dict[int, tuple[int, bytes]] = {}

    def hear(self, message: Message) -> None:
        """A VOUCH. The last one of a member counts."""
        h, body = message.header, bytes(message.body)
        if h.generation <= FIRST or len(body) != DIGEST_NBYTES:
            raise CorruptFrame(f"VOUCH of {len(body)} bytes in generation {h.generation}, allowed {DIGEST_NBYTES} bytes behind "
                               f"generation {FIRST}", peer=peer_name(message.peer))
        with self._lock:
            self._said[message.peer] = h.generation, body

    def go_over(self, plan: bytes, generation: int, members: Collection[int], *, follows: bool) -> None:
        """Another one is in force, by the word of one. `follows`: it is the one before for whoever is left, so who stood by
        that stands by this, until it says otherwise."""
        with self._lock:
            before, self._plan = self._plan, (generation, digest_of(plan))
            self._known = self._known and follows
            self._said = {member: self._plan if follows and said == before else said
                          for member, said in self._said.items() if member in members}

    def stands(self, member: int) -> bool:
        """What it says itself counts ahead of what its server knows otherwise: plans are brought with views, too."""
        with self._lock:
            said = self._said.get(member)
            return said == self._plan if said is not None and said[0] == self._plan[0] else self._known
