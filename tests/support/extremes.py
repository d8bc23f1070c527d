"""Extreme messages of a record's type, generated from the types of its fields. Values are builtins: most are not valid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

SPREAD = 8
"""Bytes that an entry of a container takes at least, by which the number of entries is chosen."""


def least(kind: inspect.Type, number: int = 0) -> Any:
    """The smallest value of a type; texts, bytes and numbers encode which of several it is."""
    match kind:
        case inspect.StrType():
            return f"{number:x}"
        case inspect.BytesType():
            return b"%x" % number
        case inspect.IntType() | inspect.FloatType():
            return number
        case inspect.VarTupleType() | inspect.ListType():
            return ()
        case inspect.TupleType():
            return tuple(least(one, number) for one in kind.item_types)
        case inspect.DictType():
            return {}
        case inspect.UnionType():
            return None if any(isinstance(one, inspect.NoneType) for one in kind.types) else least(kind.types[0], number)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StructType():
            return fields_of(kind, {}, number)
        case inspect.Metadata():
            return least(kind.type, number)
    return False


def fields_of(kind: inspect.StructType, base: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """The fields of `base`, and the smallest of those that are missing but required."""
    needed = {field.encode_name: least(field.type, number) for field in kind.fields if field.required}
    tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
    return {**tag, **needed, **base}


def extremes(kind: inspect.Type, nbytes: int, first: int = 0) -> Iterator[tuple[str, Any]]:
    """Values of a type that fill some `nbytes`, or are at the end of its range, each with a name. Entries of containers are
    numbered from `first` on."""
    match kind:
        case inspect.StrType():
            yield "longest", "x" * nbytes
            yield "control", "\x1b" * nbytes
            yield "brackets", "(" * nbytes
            yield "empty", ""
        case inspect.BytesType():
            yield "longest", bytes(nbytes)
        case inspect.IntType():
            yield from (("most", (1 << 63) - 1), ("least", -(1 << 63)), ("unsigned", (1 << 64) - 1))
        case inspect.FloatType():
            yield from (("infinite", float("inf")), ("no number", float("nan")), ("most", 1e308), ("least", -1e308))
        case inspect.VarTupleType() | inspect.ListType():
            yield from ((f"one {name}", (value,)) for name, value in extremes(kind.item_type, nbytes, first))
            each = len(msgspec.msgpack.encode(least(kind.item_type, first + nbytes)))
            yield "many", tuple(least(kind.item_type, first + number) for number in range(nbytes // max(each, SPREAD)))
            yield "many equal", (least(kind.item_type),) * (nbytes // max(each, SPREAD))
        case inspect.TupleType():
            for place, one in enumerate(kind.item_types):
                for name, value in extremes(one, nbytes, first):
                    yield f"{place} {name}", tuple(value if n == place else least(o) for n, o in enumerate(kind.item_types))
        case inspect.DictType():
            count = nbytes // (2 * SPREAD)
            yield "many", {f"{first + number:x}": least(kind.value_type, number) for number in range(count)}
            yield from ((f"one {name}", {f"{first:x}": value}) for name, value in extremes(kind.value_type, nbytes, first))
        case inspect.UnionType():
            for one in kind.types:
                yield from extremes(one, nbytes, first)
        case inspect.LiteralType():
            yield from ((f"is {value}", value) for value in kind.values)
        case inspect.StructType():
            for field in kind.fields:
                for name, value in extremes(field.type, nbytes, first):
                    yield f"{field.name} {name}", fields_of(kind, {field.encode_name: value})
        case inspect.BoolType():
            yield "true", True
        case inspect.Metadata():
            yield from extremes(kind.type, nbytes, first)


def messages_of(record: type[msgspec.Struct], base: Mapping[str, Any], nbytes: int, first: int = 0
                ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Messages of a record's type as dicts: one field of each is extreme, the others are those of `base`. `first`: see
    `extremes`."""
    kind = inspect.type_info(record)
    assert isinstance(kind, inspect.StructType)
    yield "base", fields_of(kind, base)
    for field in kind.fields:
        for name, value in extremes(field.type, nbytes, first):
            yield f"{field.name} {name}", fields_of(kind, {**base, field.encode_name: value})


def malformed(nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Bytes that are no message: what they announce is larger than what follows, or nested deeply."""
    yield "empty", b""
    yield "nested", b"\x91" * nbytes
    yield "nested maps", b"\x81\xa1x" * (nbytes // 3)
    yield "noise", random.Random(0).randbytes(nbytes)
    for name, start in (("array", b"\xdd"), ("map", b"\xdf"), ("text", b"\xdb"), ("bytes", b"\xc6"), ("extension", b"\xc9")):
        yield f"large {name}", start + b"\xff\xff\xff\xff" + bytes(nbytes - 5)
        yield f"field of a large {name}", b"\x81\xa4home" + start + b"\x7f\xff\xff\xff" + bytes(nbytes - 11)
    yield "unknown field", msgspec.msgpack.encode({"x" * nbytes: 1})
