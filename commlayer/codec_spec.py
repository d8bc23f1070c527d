"""Parses the text of a codec, such as "topk(ratio=0.01)", into a value: family, arguments and inner codec.

The parser accepts only literals and known names, and evaluates no code.
"""

from __future__ import annotations

import ast
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from commlayer.errors import InvalidInput

VALUE_BITS: Mapping[str, int] = {"int8": 8, "fp16": 16, "fp32": 32, "bf16": 16, "int4": 4}
"""Bits per value of each value type that sparse codecs can send."""
LEVEL_BITS: Mapping[int, int] = {1: 2, 3: 3, 7: 4, 15: 5, 127: 8}
"""Bits per value, including the sign, for each allowed number of levels of the codec qsgd."""
DRAWN_VALUES = ("fp32", "fp16", "bf16")
"""Value types of the codec randomk: types without a scale, whose values can be summed without decoding."""
NORMS = ("max", "l2")
RUNS = (8, 16, 32, 64)
MOST_RANK = 256
MOST_BLOCK = 1 << 20
ELEMENT_NBYTES = 4
NAMES_NBYTES = 4096
"""Upper bound in bytes for the names and numbers in a codec's saved state."""

MAX_TEXT_CHARS = 4096
"""Longest text of a codec. The longest correct ones name the shapes of the 64 tensors that a bucket may have. Parsing takes
about 500 bytes of memory per character."""
QUOTED_CHARS = 80
"""Number of characters that the error about a longer text quotes."""

FEEDBACK = "error_feedback"
TWO_WAY = "two_way"
SPARSE = ("topk", "block_threshold", "randomk")
"""Codec families that send only some of the elements."""


class CodecSpec(msgspec.Struct, frozen=True):
    """A parsed codec: its family and its arguments.

    >>> parse_spec("error_feedback(topk(0.5))").bare == parse_spec("topk(ratio=0.5, values='int8')")
    True
    >>> parse_spec("momentum(topk(values='fp32'))").core.get("values")
    'fp32'
    """

    family: str
    arguments: tuple[tuple[str, Any], ...]
    """All arguments as pairs of name and value, in order, with defaults filled in."""

    def __str__(self) -> str:
        """The shortest text of the codec, without arguments that have default values, except the ratio."""
        rules = RULES[self.family]
        arguments = [f"{name}={value if isinstance(value, CodecSpec) else repr(value)}" for name, value in self.arguments
                     if name == "ratio" or value != rules[name].default]
        return f"{self.family}({', '.join(text.removeprefix('inner=') for text in arguments)})"

    def get(self, name: str) -> Any:
        """The value of an argument. Returns None if the family has no such argument."""
        return dict(self.arguments).get(name)

    @property
    def inner(self) -> CodecSpec | None:
        """The codec that this one wraps. Returns None if the codec wraps no other codec."""
        value = self.get("inner")
        return value if isinstance(value, CodecSpec) else None

    @property
    def core(self) -> CodecSpec:
        return self if self.inner is None else self.inner.core

    @property
    def bare(self) -> CodecSpec:
        """The codec without outer error feedback. (Plans add error feedback where needed, and profiled costs include it.)"""
        return self.inner if self.family == FEEDBACK and self.inner is not None else self

    @property
    def ratio(self) -> float | None:
        """The fraction of elements that is sent; None for a codec that sends all."""
        value = self.core.get("ratio")
        return None if value is None else float(value)

    @property
    def sparse(self) -> bool:
        return self.core.family in SPARSE

    @property
    def needs_shape(self) -> bool:
        """True: the codec needs the shape of its bucket. Without a shape it sends all elements uncompressed."""
        return self.core.family == "powersgd" and self.core.get("shapes") is None

    def with_core(self, make: Callable[[CodecSpec], CodecSpec]) -> CodecSpec:
        """Returns the same wrappers around `make(core)`, where `core` is the innermost codec."""
        if self.inner is None:
            return make(self)
        inner = self.inner.with_core(make)
        return CodecSpec(self.family, tuple((name, inner if name == "inner" else value) for name, value in self.arguments))

    def without_shapes(self) -> CodecSpec:
        """The codec without the shapes of a bucket's tensors, as profiles measure it: shapes do not change its cost."""
        return self.with_core(lambda core: CodecSpec(core.family, tuple(
            (name, None if name == "shapes" else value) for name, value in core.arguments)))

    def max_state_nbytes(self, numel: int) -> int:
        """Upper bound in bytes of the codec state that a server keeps between steps, for a bucket of `numel` elements."""
        return ELEMENT_NBYTES * numel + NAMES_NBYTES

    def layers(self) -> Iterator[CodecSpec]:
        """All codecs of a nested codec, from the outermost wrapper to the core."""
        yield self
        if self.inner is not None:
            yield from self.inner.layers()

    def without_ratio(self) -> CodecSpec:
        """The codec with its ratio set to None. Codecs that differ only in the ratio give equal results."""
        return CodecSpec(self.family, tuple(
            (name, value.without_ratio() if isinstance(value, CodecSpec) else None if name == "ratio" else value)
            for name, value in self.arguments
        ))


class _Rule(NamedTuple):
    """The rule for one argument: its default, a check of a value, and the allowed values as text."""

    default: Any
    fits: Callable[[Any], bool]
    allowed: str


_NEEDED = object()
_parsing = threading.Lock()
"""Lock around ast.parse, which in CPython 3.11 can raise SystemError when two threads call it during garbage collection."""


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    # math.isfinite() cannot convert the largest integers.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _choice_rule(default: Any, kinds: Any, note: str = "") -> _Rule:
    choices = ", ".join(map(repr, kinds))
    return _Rule(default, lambda v: isinstance(v, str | int) and not isinstance(v, bool) and v in kinds,
                 f"one of {choices}{note}")


def _block(default: int, multiple: int) -> _Rule:
    what = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    return _Rule(default, lambda v: _whole(v) and v <= MOST_BLOCK and v % multiple == 0,
                 f"{what} from {multiple} to {MOST_BLOCK}")


def _optional(rule: _Rule) -> _Rule:
    return _Rule(None, lambda v: v is None or rule.fits(v), f"None or {rule.allowed}")


def _ratio(default: float) -> _Rule:
    return _Rule(default, lambda v: _number(v) and 0 < v <= 1, "a number above 0 and up to 1")


def _shapes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(
        isinstance(shape, tuple) and len(shape) > 0 and all(_whole(side, 0) for side in shape) for shape in value)


_FLAG = _Rule(False, lambda v: isinstance(v, bool), "True or False")
_INNER = _Rule(_NEEDED, lambda v: isinstance(v, CodecSpec), "a codec")
_BETA = _Rule(0.9, lambda v: _number(v) and 0 <= v < 1, "a number from 0 to below 1")
_VALUES = _choice_rule("int8", tuple(VALUE_BITS))

RULES: Mapping[str, Mapping[str, _Rule]] = {
    "identity": {},
    "fp16": {},
    "bf16": {},
    "int8": {"block": _block(1024, 1)},
    "int4": {"block": _block(64, 8)},
    "qsgd": {"block": _block(512, 8), "levels": _choice_rule(7, tuple(LEVEL_BITS), ""),
             "norm": _choice_rule("max", NORMS)},
    "onebit": {"block": _block(512, 8)},
    "topk": {"ratio": _ratio(0.01), "values": _VALUES, "exact": _FLAG},
    "block_threshold": {"ratio": _ratio(0.01), "run": _choice_rule(16, RUNS), "values": _VALUES},
    "randomk": {"ratio": _ratio(0.01), "values": _choice_rule("fp32", DRAWN_VALUES), "unbiased": _FLAG},
    "powersgd": {"rank": _Rule(4, lambda v: _whole(v) and v <= MOST_RANK, f"a whole number from 1 to {MOST_RANK}"),
                 "shapes": _optional(_Rule(_NEEDED, _shapes, "a tuple of shapes, such as ((64, 33), (64,))"))},
    "error_feedback": {"inner": _INNER, "lr_correction": _FLAG},
    "momentum": {"inner": _INNER, "beta": _BETA},
}
"""Arguments per family, in the order of its factory's parameters."""


_BOTH_WAYS = {**RULES, TWO_WAY: {"up": _INNER, "down": _INNER}}


def check_arguments(family: str, every: Mapping[str, Mapping[str, _Rule]] = RULES, /, **arguments: Any) -> None:
    """Raises a ValueError of one line for the first argument whose value the family does not allow."""
    for name, value in arguments.items():
        rule = every[family][name]
        if not rule.fits(value):
            raise InvalidInput("E-CODEC-ARGUMENT", f"{family}: {name} is {value!r}, but it must be {rule.allowed}")


@functools.lru_cache(1024)
def parse_spec(text: str) -> CodecSpec:
    """Parses a codec such as "int4" or "error_feedback(topk(ratio=0.01, values='int8'))". Raises a ValueError of one line if
    the text is malformed."""
    return _read(_call(text), text)


def split_two_way(text: str) -> tuple[CodecSpec, CodecSpec | None]:
    """Splits "two_way(up, down)" into upload and download codec. For any other codec, returns that codec and None.

    >>> [str(way) for way in split_two_way("two_way(topk(0.01), down=int8())")]
    ['topk(ratio=0.01)', 'int8()']
    """
    call = _call(text)
    if not (isinstance(call.func, ast.Name) and call.func.id == TWO_WAY):
        return parse_spec(text), None
    both = _read(call, text, _BOTH_WAYS)
    return both.get("up"), both.get("down")


def spec_error(text: str) -> str:
    """The reason why `text` is not a valid codec; "" if `text` is valid."""
    try:
        split_two_way(text)
    except ValueError as error:
        return str(error)
    return ""


def _call(text: str) -> ast.Call:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidInput("E-CODEC-NAME", f"codec {text[:QUOTED_CHARS]!r}...: its text has {len(text)} characters, allowed "
                                           f"{MAX_TEXT_CHARS}: name fewer shapes, in smaller buckets")
    try:
        with _parsing:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if isinstance(tree, ast.Name):
        tree = ast.Call(tree, [], [])
    if not isinstance(tree, ast.Call):
        raise InvalidInput("E-CODEC-NAME", f"codec {text!r}: expected a name such as int4, with arguments in parentheses if it "
                                           "needs them, such as topk(ratio=0.01)")
    return tree


def _read(call: ast.Call, text: str, every: Mapping[str, Mapping[str, _Rule]] = RULES) -> CodecSpec:
    family = call.func.id if isinstance(call.func, ast.Name) else _source(call.func, text)
    if family not in every:
        inside = f"; {TWO_WAY} must be the outermost codec" if family == TWO_WAY else ""
        raise InvalidInput("E-CODEC-NAME",
                           f"codec {text!r}: {family!r} is unknown, it must be one of {', '.join(sorted(every))}{inside}")
    rules = every[family]
    allowed = list(rules)
    values: dict[str, Any] = {}
    if len(call.args) > len(allowed):
        raise InvalidInput("E-CODEC-NAME", f"codec {text!r}: {family} takes {len(allowed)} arguments ({', '.join(allowed)}), "
                           f"got {len(call.args)}")
    pairs = [*zip(allowed, call.args, strict=False), *((str(k.arg), k.value) for k in call.keywords)]
    for argument, node in pairs:
        if argument not in rules:
            raise InvalidInput("E-CODEC-NAME", f"codec {text!r}: {family} has no argument {argument!r}; its arguments are: "
                                               f"{', '.join(allowed) or 'none'}")
        if argument in values:
            raise InvalidInput("E-CODEC-NAME", f"codec {text!r}: {family} got {argument!r} twice")
        values[argument] = _value(node, text)
    missing = [name for name, rule in rules.items() if rule.default is _NEEDED and name not in values]
    if missing:
        raise InvalidInput("E-CODEC-NAME", f"codec {text!r}: {family} needs {', '.join(missing)}")
    arguments = {name: values.get(name, rule.default) for name, rule in rules.items()}
    check_arguments(family, every, **arguments)
    return CodecSpec(family, tuple(arguments.items()))


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _read(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise InvalidInput("E-CODEC-NAME",
                           f"codec {text!r}: {_source(node, text)!r} is neither a literal nor a codec") from None


def _source(node: ast.expr, text: str) -> str:
    """Returns the text of a part of a codec. (`ast.unparse` fails at a deeply nested part.)"""
    return ast.get_source_segment(text.strip(), node) or text
