"""`make bench-check` passes on what is stored, and fails where one ratio is beyond its limit."""

from __future__ import annotations

import json

from bench import check, memory

STORED = json.loads(check.EXPECTED.read_text())


def test_what_is_stored_passes() -> None:
    found = {name: each["ratio"] for name, each in STORED.items()}
    assert check.compared(found, STORED)["code"] == 0


def test_one_that_is_worse_fails_and_is_named() -> None:
    for name, each in STORED.items():
        limit = each["ratio"] * (1 + each["tolerance"])
        result = check.compared({name: limit * 1.01}, STORED)
        assert result["code"] == 1
        assert result["summary"]["worse"] == [name]
        assert check.compared({name: limit * 0.99}, STORED)["code"] == 0


def test_each_way_of_memory_has_a_stored_ratio() -> None:
    assert {*check.WAYS} <= memory.WAYS.keys()
    assert all(any(f", {way}," in name for name in STORED) for way in check.WAYS)
