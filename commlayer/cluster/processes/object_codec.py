"""Encodes Python objects as bytes and back, without pickle: the values of torch's object collectives between homes.

Decoding creates only the types listed here and calls no code that the bytes name. Its memory and time are proportional to the
bytes: every size is compared with the bytes that are there before anything is made of it.
"""

from __future__ import annotations

import math
import pathlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MAX_DEPTH, MAX_VALUES, MAX_DIMENSIONS = 64, 1 << 20, 64
"""Largest depth of containers in containers, number of values in one object, and number of dimensions. A tensor or array is one
value."""
ALLOWED = ("None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, OrderedDict, paths, "
           "dense tensors, torch.Size, torch.dtype, torch.device, and NumPy arrays and scalars of numbers")
KEYS = "str, bytes, float, bool, None, int of up to 64 bits, and short tuples of these"
"""Types of keys and of elements of sets."""
MAX_TUPLES, MAX_TUPLE = 4096, 16
"""Largest number of keys that are tuples, and largest length of these. Different tuples, or longer integers, with equal hashes
are easy to make, and a dict of a million would take hours."""
_NUMPY_KINDS = "biufcSMm"
_COUNT, _FLOAT, _COMPLEX = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<dd")


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _float(data: bytes) -> Any:
    return _FLOAT.unpack(data)[0]


def _complex_bytes(value: complex) -> bytes:
    return _COMPLEX.pack(value.real, value.imag)


def _complex(data: bytes) -> complex:
    return complex(*_COMPLEX.unpack(data))


def _text_bytes(value: object) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")


def _from_text(make: Callable[[str], Any]) -> Callable[[bytes], Any]:
    def decode_text(data: bytes) -> Any:
        return make(data.decode("utf-8", "surrogatepass"))

    return decode_text


def _dtype_bytes(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError("no dtype")
    return found


def _from_pairs(make: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    def mapping(flat: list[Any]) -> Any:
        return make(zip(flat[::2], flat[1::2], strict=True))

    return mapping


_FIXED: dict[str, Any] = {"N": None, "1": True, "0": False}
_PLAIN: dict[str, tuple[type, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "i": (int, _int_bytes, _int), "f": (float, _FLOAT.pack, _float), "c": (complex, _complex_bytes, _complex),
    "u": (str, _text_bytes, _from_text(str)), "b": (bytes, bytes, bytes), "B": (bytearray, bytes, bytearray),
    "p": (pathlib.PurePath, _text_bytes, _from_text(pathlib.Path)), "T": (torch.dtype, _dtype_bytes, _from_text(_dtype)),
    "D": (torch.device, _text_bytes, _from_text(torch.device))}
"""By tag: a type whose values contain no others, and the functions to and from bytes."""
_CONTAINERS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "l": (list, list), "t": (tuple, tuple), "z": (torch.Size, torch.Size), "s": (set, set), "S": (frozenset, frozenset),
    "d": (dict, _from_pairs(dict)), "o": (OrderedDict, _from_pairs(OrderedDict))}
"""By tag: a type of containers, and the function that makes one of its elements; of a dict, keys and values in turn."""
_HASHED = {"s": 1, "S": 1, "d": 2, "o": 2}
"""By tag of a container: the step between elements that must be hashed."""
_TAGS: dict[type, str] = {kind: tag for table in (_PLAIN, _CONTAINERS) for tag, (kind, *_) in table.items()}


def encode(value: Any) -> bytearray:
    """Raises ValueError, with the reason, for an object that cannot be sent."""
    writer = _Writer()
    writer.write(value, 0)
    return writer.out


def decode(data: Any) -> Any:
    """Raises ValueError for malformed bytes. `data`: a buffer of bytes."""
    reader = _Reader(data)
    try:
        value = reader.read(0)
    except Exception as error:  # of many types in torch and NumPy
        raise ValueError(f"it is malformed ({type(error).__name__} at byte {reader.at})") from None
    if reader.at != len(data):
        raise ValueError(f"it is malformed ({len(data) - reader.at} bytes are left over)")
    return value


class _DecodeBudget:
    """The remaining limits of one object."""

    def __init__(self) -> None:
        self._values, self._tuples = MAX_VALUES, MAX_TUPLES

    def _count(self, depth: int) -> None:
        self._values -= 1
        if self._values < 0 or depth > MAX_DEPTH:
            raise ValueError(f"it contains more than {MAX_VALUES} values, or {MAX_DEPTH} levels of containers: send many "
                             "numbers as a tensor or array")

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is tuple and len(key) <= MAX_TUPLE and self._tuples and all(map(_is_key, key)):
                self._tuples -= 1
            elif not _is_key(key):
                raise ValueError(f"it contains a dict or set with a key of type {type(key).__name__}, allowed: {KEYS}, at most "
                                 f"{MAX_TUPLES} tuples")


class _Writer(_DecodeBudget):
    def __init__(self) -> None:
        super().__init__()
        self.out = bytearray()

    def write(self, value: Any, depth: int) -> None:
        self._count(depth)
        kind = type(value)
        tag = "p" if isinstance(value, pathlib.PurePath) else _TAGS.get(kind, "")
        if value is None or kind is bool:
            self.out += b"N" if value is None else b"1" if value else b"0"
        elif tag in _PLAIN:
            self._bytes(tag, _PLAIN[tag][1](value))
        elif tag in _CONTAINERS:
            elements = [each for pair in value.items() for each in pair] if isinstance(value, dict) else list(value)
            if step := _HASHED.get(tag, 0):
                self._check_keys(elements[::step])
            self.out += tag.encode() + _COUNT.pack(len(elements))
            for each in elements:
                self.write(each, depth + 1)
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta):
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            self._array("x", value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY_KINDS:
            self._array("a" if isinstance(value, np.ndarray) else "g", value.dtype.str, value.shape, value.tobytes())
        else:
            raise ValueError(f"it contains a value of type {kind.__module__}.{kind.__qualname__}, allowed: {ALLOWED}")

    def _array(self, tag: str, dtype: Any, shape: Any, data: bytes) -> None:
        self.out += tag.encode()
        self.write((dtype, tuple(shape)), 0)
        self._bytes("b", data)

    def _bytes(self, tag: str, data: bytes) -> None:
        self.out += tag.encode() + _COUNT.pack(len(data))
        self.out += data


class _Reader(_DecodeBudget):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data, self.at = memoryview(data), 0

    def read(self, depth: int) -> Any:
        self._count(depth)
        tag = chr(self._take(1)[0])
        if tag in _FIXED:
            return _FIXED[tag]
        if tag in ("x", "a", "g"):
            return self._array(tag)
        (count,) = _COUNT.unpack(self._take(_COUNT.size))
        if tag in _PLAIN:
            return _PLAIN[tag][2](bytes(self._take(count)))
        make = _CONTAINERS[tag][1]
        if count > min(len(self._data) - self.at, self._values):  # each element takes a byte
            raise ValueError("too many elements")
        elements = [self.read(depth + 1) for _ in range(count)]
        if step := _HASHED.get(tag, 0):
            self._check_keys(elements[::step])
        return make(elements)

    def _array(self, tag: str) -> Any:
        (dtype, shape), data = self.read(MAX_DEPTH - 2), self.read(MAX_DEPTH)
        if type(data) is not bytes or type(shape) is not tuple or len(shape) > MAX_DIMENSIONS or \
                not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
            raise ValueError("no shape, or no bytes")
        if tag == "x":
            numel, nbytes = math.prod(shape), len(data)
            if not isinstance(dtype, torch.dtype) or numel * dtype.itemsize != nbytes:
                raise ValueError("a tensor of another size")
            return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
        if type(dtype) is not str or len(dtype) > 32:
            raise ValueError("no dtype")
        known = np.dtype(dtype)
        if known.kind not in _NUMPY_KINDS or not known.itemsize:
            raise ValueError("an array of another dtype")
        array = np.frombuffer(bytearray(data), known).reshape(shape)
        return array if tag == "a" else array[()]

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self.at:
            raise ValueError("it ends early")
        self.at += count
        return self._data[self.at - count : self.at]


def _is_key(key: Any) -> bool:
    return key is None or type(key) in (str, bytes, float, bool) or (type(key) is int and key.bit_length() <= 64)
