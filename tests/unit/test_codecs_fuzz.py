"""Damaged payloads at every reader of every codec: those that are kept, and fresh ones. `make fuzz` does it for longer."""

from __future__ import annotations

import pytest
from support import codecs as kit
from support import fuzzing

from commlayer.compressors.payload import CODEC_IDS
from commlayer.compressors.plan_codecs import FACTORIES


def test_every_codec_is_attacked_in_every_round() -> None:
    found = {(target.codec.id, target.r) for target in fuzzing.targets()}
    assert {number for number, _ in found} == set(CODEC_IDS.values())
    assert all(any(t.text == kit.NAMED[name] and t.r == r for t in fuzzing.targets())
               for name in FACTORIES for r in range(len(kit.EVERY[name].rounds)))


def test_what_is_kept_is_still_refused() -> None:
    """Each line by at least one reader, as it was when it was found."""
    for target, bad in fuzzing.read_corpus():
        said = fuzzing.Stands(target).attack(bad)
        assert any(said), fuzzing.line_of(target, bad)


@pytest.mark.nightly
def test_fresh_damage_is_refused_or_read_alike() -> None:
    assert fuzzing.run(20261121, attacks=10) > 1800


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_the_attack_sees_what_it_is_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that writes before it has judged is a finding."""
    target = fuzzing.Target(kit.NAMED[name], (300,), 0)
    stands = fuzzing.Stands(target)
    good = fuzzing.stand(target).payloads[0]
    inner = target.codec.inner if "error_feedback" in str(target.codec) else target.codec

    def hasty(self: object, r: int, payload: object, acc: dict, *, first: bool) -> None:
        acc["flagged"][0] = not acc["flagged"][0]
        self.put(r, self.vet(r, payload, acc, first=first), acc, first=first)

    monkeypatch.setattr(type(inner), "add", hasty)
    with pytest.raises(AssertionError, match="add changed the accumulator before it refused"):
        stands.attack(good[:-1])
