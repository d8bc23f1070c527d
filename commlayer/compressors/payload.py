"""Writes and reads the header of payloads.

The header has sixteen bytes, little endian: codec u8, version u8, flags u8, aux u8, numel u32, count u32, seed u32. See
docs/reference/wire.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import numpy as np

from commlayer.errors import CorruptPayload

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

# Union, since `|` would load torch.
Out: TypeAlias = Union[memoryview, "torch.Tensor"]
"""Payload memory to write, owned by the caller: a memoryview of host memory, or a uint8 tensor on a device."""

Buffer: TypeAlias = Out | bytes | bytearray
"""Payload bytes to read."""

VERSION = 1
NONFINITE = 1
"""Flag of a payload whose input was not finite. Such a payload has no body."""

MAX_NUMEL = 0xFFFFFFFF

CODEC_IDS = {
    "identity": 1,
    "fp16": 2,
    "bf16": 3,
    "int8": 4,
    "topk": 5,
    "int4": 6,
    "qsgd": 7,
    "onebit": 10,
    "block_threshold": 11,
    "randomk": 12,
    "powersgd": 13,
}
"""Numbers of the codecs on the wire. Numbers are never reused (8, 9, 14, 15 and 16 are retired). 240-255 are free for
experiments and tests."""

_LAYOUT = struct.Struct("<BBBBIII")
HEADER_NBYTES = _LAYOUT.size


class Head(NamedTuple):
    """A checked payload header, and the body that follows it."""

    flagged: bool
    aux: int
    """A byte whose meaning each codec defines."""
    entries: int
    """Number of entries in the body; for dense codecs the number of elements."""
    seed: int
    body: Out


def on_device(memory: Any) -> TypeIs[torch.Tensor]:
    """True: the memory is a torch tensor; False: an array or bytes in host memory."""
    return not isinstance(memory, _HOST)


_HOST = np.ndarray, memoryview, bytes, bytearray


def codec_name(number: int) -> str:
    names = [name for name, known in CODEC_IDS.items() if known == number]
    return names[0] if names else f"codec {number}"


def write(out: Out, codec: int, numel: int, count: int, aux: int = 0, seed: int = 0) -> None:
    _put(out, codec, VERSION, 0, aux, numel, count, seed)


def write_flagged(out: Out, codec: int, numel: int) -> int:
    """Writes the complete payload for input that is not finite, and returns its size."""
    _put(out, codec, VERSION, NONFINITE, 0, numel, 0, 0)
    return HEADER_NBYTES


def _put(out: Out, *fields: int) -> None:
    if on_device(out):
        import torch

        out[:HEADER_NBYTES].copy_(torch.frombuffer(bytearray(_LAYOUT.pack(*fields)), dtype=torch.uint8))
    else:
        _LAYOUT.pack_into(out, 0, *fields)


def _split(payload: Buffer) -> tuple[memoryview, Out]:
    """Splits a payload into the header's bytes, in host memory, and the body in its own memory. Either may be shorter than
    needed."""
    if on_device(payload):
        return payload[:HEADER_NBYTES].cpu().numpy().data, payload[HEADER_NBYTES:]
    view = memoryview(payload)
    view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    return view[:HEADER_NBYTES], view[HEADER_NBYTES:]


def read(payload: Buffer, codec: int, numel: int) -> Head:
    """Reads and checks the header. Raises CorruptPayload, which names what was received and what was expected."""
    header, body = _split(payload)
    if header.nbytes < HEADER_NBYTES:
        raise CorruptPayload(f"payload of {header.nbytes} bytes is shorter than its header of {HEADER_NBYTES} bytes")
    got, version, flags, aux, got_numel, count, seed = _LAYOUT.unpack_from(header)
    if got != codec:
        raise CorruptPayload(f"payload was compressed by {codec_name(got)}, expected {codec_name(codec)}")
    if version != VERSION:
        raise CorruptPayload(f"payload has version {version}, but this process supports only version {VERSION}")
    if flags & ~NONFINITE:
        raise CorruptPayload(f"payload has flags {flags:#04x}, but this process knows only {NONFINITE:#04x}")
    if got_numel != numel:
        raise CorruptPayload(f"payload has {got_numel} elements, but the bucket has {numel}")
    if count > numel:
        raise CorruptPayload(f"payload has {count} entries, but the bucket has only {numel} elements")
    if flags & NONFINITE and (body.nbytes or aux or count or seed):
        raise CorruptPayload(f"payload is flagged as not finite, so its body, aux and count must be empty; got {body.nbytes} "
                             f"bytes of body, aux {aux}, count {count}")
    return Head(bool(flags & NONFINITE), aux, count, seed, body)


def expect(what: str, got: int, wanted: int) -> None:
    """Raises CorruptPayload with both numbers if they differ. `what`: name of the number."""
    if got != wanted:
        raise CorruptPayload(f"payload has {what} {got}, expected {wanted}")
