"""A server without torch: the same bytes and state as with it, for every codec and every event that a server hears of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import codecs as kit
from support.coordinators import WAIT_S, quick

from commlayer import records
from commlayer.cluster import messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.server_codecs import CodecOps, ops_of
from commlayer.compressors import fallback, kernels, seed, tensors
from commlayer.compressors.plan_codecs import codec_of
from commlayer.errors import CorruptFrame
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key

pytestmark = pytest.mark.skipif("native" not in kernels.BACKENDS, reason="built without the native core")

WORKERS = 2
SLICES = (Slice(0, 0, 4000), Slice(1, 16, 4016), Slice(2, 0, 16128))
VECTOR = Bucket(0, SLICES, "service")
"""Larger than what is sorted whole (selection.EXACT_NUMEL)."""
MATRIX = Bucket(0, (Slice(0, 0, 96 * 47),), "service", shape=(96, 47))
DOWN = ["topk(ratio=1.0, values='fp16')", "int8()", "error_feedback(topk(ratio=0.05))", "error_feedback(onebit())"]
MORE = ["error_feedback(fp16())",
        "error_feedback(randomk(ratio=0.3, values='bf16'))",
        "powersgd(rank=2, shapes=((64, 50), (20928,)))",
        "topk(ratio=0.05, values='int4', exact=True)"]
CASES = [*({"codec": text} for text in [*kit.NAMED.values(), *map(str, kit.PLAIN), *MORE]),
         *({"codec": "topk(ratio=0.05)", "down": down} for down in DOWN)]


class Served:
    """A server of one bucket and the results that it has sent."""

    def __init__(self, bucket: Bucket) -> None:
        self.ops = CodecOps(codec_of(bucket), bucket, "job")
        self.accs = [self.ops.zeros(r) for r in range(self.ops.rounds)]
        self.out = memoryview(bytearray(self.ops.bound))

    def sum(self, r: int, payloads: list[bytes]) -> bytes:
        for i, payload in enumerate(payloads):
            self.ops.add(r, memoryview(payload), self.accs[r], i == 0)
        return bytes(self.out[: self.ops.emit(r, self.accs[r], self.out)])

    def mean(self, payloads: list[bytes], weights: list[float]) -> bytes:
        for i, (payload, weight) in enumerate(zip(payloads, weights, strict=True)):
            self.ops.weigh(memoryview(payload), weight, i == 0)
        return bytes(self.out[: self.ops.emit(0, self.accs[0], self.out)])


class Pair:
    """The same server twice; what both give must be equal."""

    def __init__(self, bucket: Bucket) -> None:
        self.real = Served(bucket)
        with tensors.plain():
            self.plain = Served(bucket)

    def do(self, act: Callable[[Served], Any]) -> Any:
        real = act(self.real)
        with tensors.plain():
            plain = act(self.plain)
        assert plain == real
        return real


def steps(bucket: Bucket, pair: Pair) -> Iterator[list[torch.Tensor]]:
    """Steps of workers that have torch, over both servers; the inputs of each are asked for by the caller."""
    codec = codec_of(bucket)
    states = [codec.init(bucket.spec) for _ in range(WORKERS)]
    for rank, state in enumerate(states):
        seed(state, "job", 0, rank)
    while True:
        xs: list[torch.Tensor] = yield []
        result = b""
        for r in range(len(codec.rounds)):
            payloads = []
            for x, state in zip(xs, states, strict=True):
                out = memoryview(bytearray(codec.bound(bucket.spec)))
                nbytes = codec.start(x, state, out) if r == 0 else codec.next(r - 1, result, state, out)
                payloads.append(bytes(out[:nbytes]))
            result = pair.do(lambda served, r=r, payloads=payloads: served.sum(r, payloads))
        for state in states:
            codec.decode(result, state, torch.empty(bucket.numel))


def inputs(step: int, numel: int) -> list[torch.Tensor]:
    return [kit.noise(numel, 10 * step + rank) * 3.0**step for rank in range(WORKERS)]


SHAPED = [
    pytest.param(fields, shape, id=f"{name}, {' '.join(fields.values())}")
    for name, shape in (("vector", VECTOR), ("matrix", MATRIX)) for fields in CASES
    if shape is VECTOR or "shapes=((" not in fields["codec"]  # which are those of the vector
]


@pytest.mark.parametrize(("fields", "shape"), SHAPED)
def test_a_server_without_torch_gives_the_same_bytes(fields: dict[str, str], shape: Bucket) -> None:
    bucket = Bucket(0, shape.slices, "service", shape=shape.shape, **fields)
    pair = Pair(bucket)
    run = steps(bucket, pair)
    next(run)
    numel, every = bucket.numel, (1 << len(bucket.slices)) - 1
    state = lambda served: served.ops.snapshot()  # noqa: E731

    for step in range(4):
        run.send(inputs(step, numel))
    broken = inputs(4, numel)
    broken[1][numel // 2] = float("inf")
    run.send(broken)  # flagged, which a server's estimate outlives
    run.send(inputs(5, numel))
    pair.do(lambda served: served.ops.undo(1))  # one slice was not applied
    run.send(inputs(0, numel))
    pair.do(lambda served: served.ops.undo(every))
    huge = [torch.full((numel,), 3e38), torch.full((numel,), 3e38)]
    run.send(huge)  # the sum is not finite
    pair.do(lambda served: served.ops.undo(1))
    run.send(inputs(1, numel))
    pair.do(lambda served: served.ops.skip())

    saved = pair.do(state)
    run.send(inputs(2, numel))
    pair.do(lambda served: served.ops.restore(saved))
    assert pair.do(state) == saved
    pair.do(lambda served: [(d.tensor, d.start, d.values.numpy().tobytes()) for d in served.ops.debts()])

    def hand_over(served: Served) -> bytes:
        """To a server of the next plan."""
        after = CodecOps(codec_of(bucket), bucket, "job")
        after.take_over(served.ops.debts())
        return after.snapshot()

    pair.do(hand_over)


def coded(x: torch.Tensor) -> bytes:
    out = memoryview(bytearray(16 + 4 * x.numel()))
    return bytes(out[: codec_of(VECTOR).start(x, {}, out)])


def test_a_mean_of_equal_values_is_these_to_the_bit() -> None:
    """Whatever they weigh. A mean with what is not finite is flagged, and the next one is not."""
    pair = Pair(VECTOR)
    equal, weights = kit.noise(VECTOR.numel, 3) * 1e-3, [0.1, 1 / 3, 7.7, 0.0, 1e-6]
    weights = [float(torch.tensor(w)) for w in weights]  # as headers have them
    assert pair.do(lambda served: served.mean([coded(equal)] * 5, weights)) == coded(equal)
    bad = equal.clone()
    bad[3] = float("nan")
    flagged = pair.do(lambda served: served.mean([coded(equal), coded(bad)], [1.0, 1.0]))
    assert not codec_of(VECTOR).decode(flagged, {}, torch.empty(VECTOR.numel))
    both = pair.do(lambda served: served.mean([coded(equal), coded(3 * equal)], [3.0, 1.0]))
    got = torch.empty(VECTOR.numel)
    assert codec_of(VECTOR).decode(both, {}, got)
    torch.testing.assert_close(got, 1.5 * equal, rtol=1e-7, atol=0)


def test_which_buckets_are_means_follows_from_the_plan_and_the_number_of_gradients() -> None:
    coded = {"identity()": True, "fp16()": False, "error_feedback(int8())": False}
    buckets = [Bucket(0, (Slice(0, 0, 8),), "service")]
    buckets += [Bucket(1 + i, (Slice(1, 0, 8),), "service", codec=text) for i, text in enumerate(coded)]
    plan = Plan("job", tuple(buckets), servers=1)
    assert [ops.means for ops in ops_of(plan, 0, gradients=1).values()] == [False, *coded.values()]
    assert not any(ops.means for gradients in (2, -1) for ops in ops_of(plan, 0, gradients=gradients).values())


@pytest.mark.parametrize("text", ["topk(ratio=0.05)", "error_feedback(int8())"])
def test_bytes_and_states_that_do_not_fit_are_refused_in_the_same_words(text: str) -> None:
    pair = Pair(Bucket(0, SLICES, "service", codec=text))

    def refusals(served: Served) -> list[str]:
        said = []
        junk = [bytes(40), bytes(range(64)), b""]
        acts = [*((lambda data=data: served.ops.add(0, memoryview(data), served.accs[0], True)) for data in junk),
                *((lambda data=data: served.ops.restore(data)) for data in [b"junk", *OTHERS])]
        for act in acts:
            with pytest.raises((ValueError, CorruptFrame)) as caught:
                act()
            said.append(str(caught.value))
        return said

    assert all("\n" not in line for line in pair.do(refusals))


def loaded(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.commit(1)
@pytest.mark.parametrize("backend", ["auto", "fallback"])
def test_an_embedded_server_loads_no_torch_for_any_codec(backend: str) -> None:
    texts = [text for name, text in kit.NAMED.items() if backend == "auto" or name in fallback.FAMILIES]
    cuts = [Slice(0, 100 * i, 100 * i + 100) for i in range(len(texts))]
    buckets = tuple(Bucket(i, (cuts[i],), "service", codec=text) for i, text in enumerate(texts))
    job = Job((TensorInfo("weight", (100 * len(buckets),)),))
    plan = records.encode(Plan(job.digest(), buckets, servers=1))
    config = quick(backend=backend, token="of-this-test")
    with contextlib.ExitStack() as stack:
        child = EmbeddedServer.start(config, workers=1)
        stack.callback(child.close)
        assert not loaded(child.pid, "libtorch_cpu"), "by the time that it tells its address"
        link = uplink.connect(child.control, messages.worker_request(job.digest(), 0, 1, plan=plan), config)
        stack.callback(link.close)
        for bucket in buckets:
            state = link.fetch_state(0, bucket.id, 0)
            link.put_state(0, bucket.id, 0, state)
        ones, codec = torch.ones(100), codec_of(buckets[0])
        out = memoryview(bytearray(codec.bound(buckets[0].spec)))
        nbytes = codec.start(ones, codec.init(buckets[0].spec), out)
        header = Header(Kind.PUSH, 1, step=0, bucket=0, codec=codec.id, sender=0, weight=1.0, total=1.0)
        link.transport.send(SERVER_BASE, header, out[:nbytes])
        handle = link.transport.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT)))
        assert link.transport.wait(handle, time.monotonic() + WAIT_S).body == out[:nbytes]
        assert not loaded(child.pid, "libtorch_cpu")


OTHERS = [CodecOps(codec_of(b), b, "job").snapshot() for b in (
    Bucket(0, SLICES, "service", codec="momentum(int8())"), Bucket(0, SLICES[:1], "service", codec="topk(ratio=0.1)"),
    Bucket(0, SLICES[:1], "service", codec="topk(ratio=0.05)"))]
