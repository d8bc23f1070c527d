"""Fuzzing of payloads: good ones of every codec, mutations that know the format, and what must hold of whatever they give.

An attack feeds bytes to every reader of a codec (decode, add, next) on all backends. Allowed are success and CorruptFrame;
after CorruptFrame output, accumulator and state are as they were; all backends agree, byte for byte.
"""

from __future__ import annotations

import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from commlayer.compressors import Codec, parse, seed, snapshot, wrap
from commlayer.compressors.payload import HEADER_NBYTES
from commlayer.errors import CorruptFrame
from commlayer.records import Spec
from support import codecs as kit

CORPUS = Path(__file__).parents[1] / "corpus" / "payloads.txt"
"""One line each: codec, shape, round, bytes in hex. Distinct kinds of damage, and every input that once broke a reader."""

TEXTS = [
    *kit.NAMED.values(),
    *map(str, kit.PLAIN),
    "powersgd(rank=1, shapes=((12, 9), (5,)))",
]
SHAPES = [(300,), (37,), (1,), (0,), (12, 9)]
WORDS = [0, 1, 2, 15, 16, 0x7F7F, 0x7F80, 0x8000, 0xFFFF, 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 0x80000000, 0xFFFFFFFF]
FIELDS = [(0, "B"), (1, "B"), (2, "B"), (3, "B"), (4, "<I"), (8, "<I"), (12, "<I")]
"""Offset and type of each field of the header."""


class Target(NamedTuple):
    """A codec, a bucket, and one of its rounds: what reads the bytes."""

    text: str
    shape: tuple[int, ...]
    r: int

    @property
    def codec(self) -> Codec:
        return wrap(parse(self.text))


def targets() -> list[Target]:
    """All codecs on all shapes that they take."""
    results = []
    for text in dict.fromkeys(TEXTS):
        codec = wrap(parse(text))
        for shape in SHAPES:
            try:
                codec.bound(Spec(shape))
            except ValueError:  # shapes fit one bucket alone
                continue
            results += [Target(text, shape, r) for r in range(len(codec.rounds))]
    results += [Target("powersgd(rank=1, shapes=((12, 9), (5,)))", (113,), r) for r in range(2)]
    return results


class FuzzState(NamedTuple):
    """Two workers that have sent in round r, the accumulator and the resulting bytes."""

    codec: Codec
    spec: Spec
    states: list[Any]
    server: Any
    acc: Any
    payloads: list[bytes]
    result: bytes


def fuzz_state(target: Target, number: int = 0) -> FuzzState:
    """Deterministic."""
    codec, spec = target.codec, Spec(target.shape)
    states, server = [codec.init(spec) for _ in range(2)], codec.init_server(spec)
    rooms, room, result = [kit.room(codec, spec) for _ in states], kit.room(codec, spec), b""
    acc, payloads = codec.new_accumulator(spec, 0), [b""]
    for rank, state in enumerate(states):
        seed(state, "fuzz", 1, rank)
    for r in range(target.r + 1):
        acc, payloads = codec.new_accumulator(spec, r), []
        for rank, (state, out) in enumerate(zip(states, rooms, strict=True)):
            x = kit.noise(spec.numel, 10 * number + rank)
            nbytes = codec.start(x, state, out) if r == 0 else codec.next(r - 1, result, state, out)
            payloads.append(bytes(out[:nbytes]))
            codec.add(r, payloads[-1], acc, first=rank == 0)
        result = bytes(room[: codec.emit(r, acc, server, room)])
    return FuzzState(codec, spec, states, server, acc, payloads, result)


def image(value: Any) -> Any:
    """Everything that an accumulator or a state holds, comparable."""
    if isinstance(value, dict):
        return {name: image(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [image(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) else value


def refused(read: Callable[[], object]) -> str:
    """The message of CorruptFrame; empty if the bytes were accepted."""
    words = ""
    try:
        read()
    except CorruptFrame as error:
        words = str(error) or "?"
    assert words != "?", "a CorruptFrame without a word"
    assert "\n" not in words
    return words


def decode(s: FuzzState, bad: bytes) -> tuple[str, Any]:
    out, state = torch.full((s.spec.numel,), 7.0), s.states[0]
    before, finite = image(snapshot(state)), []
    words = refused(lambda: finite.append(s.codec.decode(bad, state, out)))
    if words:
        assert bool((out == 7.0).all()), "decode wrote before it refused"
        assert image(snapshot(state)) == before, "decode changed the state before it refused"
    else:
        assert bool(torch.isfinite(out).all() if finite[0] else torch.isnan(out).all()), f"decode said {finite[0]}"
    return words, image(out.nan_to_num())


def add(s: FuzzState, bad: bytes, r: int, *, first: bool) -> tuple[str, Any]:
    before = image(s.acc)
    words = refused(lambda: s.codec.add(r, bad, s.acc, first=first))
    if words:
        assert image(s.acc) == before, "add changed the accumulator before it refused"
        return words, before
    out = kit.room(s.codec, s.spec)
    sent = bytes(out[: s.codec.emit(r, s.acc, s.server, out)])
    if len(sent) == HEADER_NBYTES:  # of sums that are not finite the accumulator may hold any NaN
        return words, sent
    return words, (sent, image(s.acc))


def following(s: FuzzState, bad: bytes, r: int) -> tuple[str, Any]:
    if r + 1 == len(s.codec.rounds):
        return "no next round", None
    out = kit.room(s.codec, s.spec)
    before, wrote = image(snapshot(s.states[1])), [0]
    words = refused(lambda: wrote.__setitem__(0, s.codec.next(r, bad, s.states[1], out)))
    if words:
        assert image(snapshot(s.states[1])) == before, "next changed the state before it refused"
    return words, bytes(out[: wrote[0]])


class FuzzStates:
    """The states of one target, one for each backend. They are replaced after accepted bytes: a refusal must change nothing."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.stands: dict[str, FuzzState] = {}

    def attack(self, bad: bytes) -> list[str]:
        """The verdict of each reader. AssertionError, or anything but CorruptFrame, is a finding."""
        r, seen = self.target.r, []
        for backend in kit.AVAILABLE:
            with kit.use(backend):
                s = self.stands.pop(backend, None) or fuzz_state(self.target)
                seen.append([add(s, bad, r, first=False), add(s, bad, r, first=True), following(s, bad, r), decode(s, bad)])
            if all(words for words, _ in seen[-1]):
                self.stands[backend] = s
        for other in seen[1:]:
            for ours, theirs in zip(seen[0], other, strict=True):
                assert bool(ours[0]) == bool(theirs[0]), f"backends disagree: {ours[0]!r} and {theirs[0]!r}"
                assert ours[1] == theirs[1], "backends read the same bytes as other numbers"
        return [words for words, _ in seen[-1]]


def mutate(rng: random.Random, good: bytes, others: list[bytes], numel: int) -> bytes:
    """Up to three changes that look like the format."""
    bad = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.randrange(8)
        if kind == 0 and len(bad) >= HEADER_NBYTES:
            at, layout = rng.choice(FIELDS)
            (old,) = struct.unpack_from(layout, bad, at)
            most = 0xFF if layout == "B" else 0xFFFFFFFF
            new = rng.choice([0, 1, old - 1, old + 1, old ^ 1 << rng.randrange(8), numel, numel + 1, most, rng.randrange(most)])
            struct.pack_into(layout, bad, at, new & most)
        elif kind == 1:
            del bad[rng.randrange(len(bad) + 1) :]
        elif kind == 2:
            bad += rng.randbytes(rng.randint(1, 9))
        elif kind == 3 and len(bad) > HEADER_NBYTES:
            bad[rng.randrange(HEADER_NBYTES, len(bad))] ^= 1 << rng.randrange(8)
        elif kind == 4 and len(bad) > HEADER_NBYTES:
            at, layout = rng.randrange(HEADER_NBYTES, len(bad)), rng.choice(["<H", "<I"])
            word = struct.pack(layout, rng.choice([*WORDS, numel, len(bad)]) & (0xFFFF if layout == "<H" else 0xFFFFFFFF))
            bad[at : at + len(word)] = word[: len(bad) - at]
        elif kind == 5:
            other = rng.choice(others)
            cut = rng.randrange(min(len(bad), len(other)) + 1)
            bad[cut:] = other[cut:] if rng.random() < 0.5 else other[rng.randrange(len(other) + 1) :]
        elif kind == 6 and len(bad) > HEADER_NBYTES:
            at = rng.randrange(HEADER_NBYTES, len(bad))
            bad[at:at] = bad[at : at + rng.choice([1, 2, 4, 8])]
        elif kind == 7 and len(bad) > HEADER_NBYTES:
            at = rng.randrange(HEADER_NBYTES, len(bad))
            del bad[at : at + rng.choice([1, 2, 4, 8])]
    return bytes(bad)


def read_corpus() -> Iterator[tuple[Target, bytes]]:
    for line in CORPUS.read_text().splitlines():
        text, shape, r, body = line.split("|")
        yield Target(text, tuple(int(d) for d in shape.split("x")), int(r)), bytes.fromhex(body)


def line_of(target: Target, bad: bytes) -> str:
    return f"{target.text}|{'x'.join(map(str, target.shape))}|{target.r}|{bad.hex()}"


def run(number: int, *, attacks: int = 0, seconds: float = 0.0, keep: dict[str, str] | None = None) -> int:
    """Makes that many attacks on each target, or as many as fit in `seconds`; returns their number. An assertion names the line
    that reproduces it.

    `keep` collects the shortest line for each refusal of a reader.
    """
    rng, result, until = random.Random(number), 0, time.monotonic() + seconds
    stood = [(FuzzStates(target), fuzz_state(target), fuzz_state(target, 1)) for target in targets()]
    everything = [good for _, *both in stood for s in both for good in (*s.payloads, s.result)]
    for _ in range(attacks) if attacks else iter(lambda: time.monotonic() < until, False):
        for stands, s, later in stood:
            target = stands.target
            own = [*s.payloads, s.result, *later.payloads, later.result]
            bad = mutate(rng, rng.choice(own), own if rng.random() < 0.8 else everything, s.spec.numel)
            try:
                text = stands.attack(bad)
            except Exception as error:
                raise AssertionError(f"{error!r} by {line_of(target, bad)}") from error
            result += 1
            if keep is not None:
                for words in filter(None, text):
                    key, line = f"{target.text.partition('(')[0]} {re.sub('[0-9]+', '#', words)}", line_of(target, bad)
                    keep[key] = min(keep.get(key, line), line, key=len)
    return result
