"""The dealer: a stream's items, each once on whichever worker, whatever is announced or resumed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samplers import Noted

from commlayer.balance import Dispatcher


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_stream_is_dealt_once(data: st.DataObject) -> None:
    items = list(range(data.draw(st.integers(0, 60))))
    batch = data.draw(st.integers(2, 10))

    def make(rank: int) -> Dispatcher:
        return Dispatcher(iter(items), batch, shares=[batch, 0], rank=rank, collate=tuple)

    dealers = [make(0), make(1)]
    sessions = [Noted(), Noted()]
    loops = [d.follow(s) for d, s in zip(dealers, sessions, strict=True)]
    seen: list[int] = []
    while (batches := [next(loop, None) for loop in loops])[0] is not None:
        seen += [i for own, session in zip(batches, sessions, strict=True) if session.n for i in own]
        event = data.draw(st.sampled_from(["none", "shares", "resume"]))
        if event == "shares":
            cut = data.draw(st.integers(0, batch))
            for dealer in dealers:
                dealer.announce(dealer.step + 2, [cut, batch - cut])
        elif event == "resume":
            states = [dealer.state_dict() for dealer in dealers]
            assert states[0] == states[1]
            dealers = [make(0), make(1)]
            for dealer in dealers:
                dealer.load_state_dict(states[0])
            loops = [d.follow(s) for d, s in zip(dealers, sessions, strict=True)]
    assert batches == [None, None]
    assert seen == items


def test_a_stream_of_tensors_collates() -> None:
    dealer = Dispatcher((torch.tensor([float(i)]) for i in range(10)), 4, shares=[3, 1], rank=0, collate=torch.stack, cap=2)
    seen = [(batch.flatten().tolist(), dealer.last) for batch in dealer.follow()]
    assert seen == [([0, 1], False), ([2], True), ([4, 5], False), ([6], True), ([8, 9], True)]
