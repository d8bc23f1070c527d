"""A server's codec operations on one bucket: snapshots, handed-over residuals, means; and a server process without torch."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import codecs as kit
from support.coordinators import WAIT_S, quick

from commlayer import records
from commlayer.cluster import messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.server_codecs import CodecOps, ops_of
from commlayer.compressors import fallback, kernels
from commlayer.compressors.plan_codecs import codec_of
from commlayer.errors import CorruptFrame
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key

pytestmark = pytest.mark.skipif("native" not in kernels.BACKENDS, reason="built without the native core")

SLICES = (Slice(0, 0, 4000), Slice(1, 16, 4016), Slice(2, 0, 16128))
VECTOR = Bucket(0, SLICES, "service")
"""Larger than what is sorted whole (selection.FEW_ENTRIES)."""
CASES = [*({"codec": text} for text in kit.NAMED.values() if "powersgd" not in text),
         *({"codec": "topk(ratio=0.05)", "down": down} for down in ("int8()", "error_feedback(topk(ratio=0.05))"))]


def served(**fields: str) -> CodecOps:
    bucket = Bucket(0, SLICES, "service", **fields)
    return CodecOps(codec_of(bucket), bucket, "job")


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: " ".join(fields.values()))
def test_a_restored_server_goes_on_to_the_bit_and_residuals_are_handed_over(fields: dict[str, str]) -> None:
    ops, other, after = (served(**fields) for _ in range(3))
    codec = codec_of(Bucket(0, SLICES, "service", **fields))
    state, room, out = codec.init(VECTOR.spec), kit.room(codec, VECTOR.spec), kit.room(codec, VECTOR.spec)

    def step(number: int, *servers: CodecOps) -> list[bytes]:
        payload, results = room[: codec.start(kit.noise(VECTOR.numel, number), state, room)], []
        for server in servers:
            acc = server.zeros(0)
            server.add(0, payload, acc, True)
            results.append(bytes(out[: server.emit(0, acc, out)]))
        return results

    for number in range(3):
        step(number, ops)
    ops.undo(1)  # one slice was not applied
    other.restore(ops.snapshot())
    assert other.snapshot() == ops.snapshot()
    first, second = step(3, ops, other)
    assert first == second
    after.take_over(ops.debts())
    assert [(d.tensor, d.start, d.values.tobytes()) for d in after.debts()] == [
        (d.tensor, d.start, d.values.tobytes()) for d in ops.debts()]


def coded(x: torch.Tensor) -> bytes:
    out = memoryview(bytearray(16 + 4 * x.numel()))
    return bytes(out[: codec_of(VECTOR).start(x, {}, out)])


def mean(ops: CodecOps, payloads: list[bytes], weights: list[float]) -> bytes:
    for i, (payload, weight) in enumerate(zip(payloads, weights, strict=True)):
        ops.weigh(memoryview(payload), weight, i == 0)
    out = memoryview(bytearray(ops.bound))
    return bytes(out[: ops.emit(0, ops.zeros(0), out)])


def test_a_mean_of_equal_values_is_these_to_the_bit() -> None:
    """Whatever they weigh. A mean with what is not finite is flagged, and the next one is not."""
    ops = CodecOps(codec_of(VECTOR), VECTOR, "job")
    equal, weights = kit.noise(VECTOR.numel, 3) * 1e-3, [float(np.float32(w)) for w in (0.1, 1 / 3, 7.7, 0.0, 1e-6)]
    assert mean(ops, [coded(equal)] * 5, weights) == coded(equal)
    bad = equal.clone()
    bad[3] = float("nan")
    got = torch.empty(VECTOR.numel)
    assert not codec_of(VECTOR).decode(mean(ops, [coded(equal), coded(bad)], [1.0, 1.0]), {}, got)
    assert codec_of(VECTOR).decode(mean(ops, [coded(equal), coded(3 * equal)], [3.0, 1.0]), {}, got)
    torch.testing.assert_close(got, 1.5 * equal, rtol=1e-7, atol=0)


def test_which_buckets_are_means_follows_from_the_plan_and_the_number_of_gradients() -> None:
    coded = {"identity()": True, "fp16()": False, "error_feedback(int8())": False}
    buckets = [Bucket(0, (Slice(0, 0, 8),), "service")]
    buckets += [Bucket(1 + i, (Slice(1, 0, 8),), "service", codec=text) for i, text in enumerate(coded)]
    plan = Plan("job", tuple(buckets), servers=1)
    assert [ops.means for ops in ops_of(plan, 0, gradients=1).values()] == [False, *coded.values()]
    assert not any(ops.means for gradients in (2, -1) for ops in ops_of(plan, 0, gradients=gradients).values())


@pytest.mark.parametrize("text", ["topk(ratio=0.05)", "error_feedback(int8())"])
def test_bytes_and_states_that_do_not_fit_are_refused(text: str) -> None:
    ops = served(codec=text)
    for junk in (bytes(40), bytes(range(64)), b""):
        with pytest.raises(CorruptFrame):
            ops.add(0, memoryview(junk), ops.zeros(0), True)
    short = Bucket(0, SLICES[:1], "service", codec="topk(ratio=0.1)")
    for junk in (b"junk", served(codec="momentum(int8())").snapshot(), CodecOps(codec_of(short), short, "job").snapshot()):
        with pytest.raises(ValueError, match=r"E-SERVER-STATE|E-CODEC-STATE"):
            ops.restore(junk)


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
