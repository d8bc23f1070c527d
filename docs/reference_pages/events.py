"""The page about the event stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from commlayer.observe import event_files, events
from reference_pages.markdown import MADE, one_line, table_row, texts_of, wrap


def event_kinds() -> str:
    lines = [
        "# Events", "", MADE, "",
        *wrap("While a job runs, its processes append events to a stream: one JSON object a line. "
               "`commlayer top`, the metrics and reports read it. [watch.md](../how-to/watch.md) shows how to get it."), "",
        *wrap("A reader ignores kinds and fields that it does not know. Fields are never renamed or removed without another "
               "`format` in the event `job`. Times in a coordinator's stream refer to the coordinator's clock."), "",
        "| file | who writes it | contents |", "| --- | --- | --- |",
        "| `rank-N.jsonl` | each rank, with the setting `events` (`COMMLAYER_EVENTS=DIR`) | its own events; those that all "
        "ranks know are in rank 0's |",
        "| `events.jsonl` | `commlayer serve --events DIR` | the events of all members and the coordinator's |", "",
        *wrap(f"A text has at most {events.MAX_TEXT_CHARS} characters. Writing stops when a file has "
               f"{event_files.MAX_FILE_NBYTES >> 30} GiB."), "",
        "| field of every event | type | meaning |", "| --- | --- | --- |",
        table_row("`event`", "text", "The kind."), *_event_fields(events.Event),
    ]
    for kind in events.KINDS:
        lines += ["", f"## {kind.__struct_config__.tag}", "", *wrap(one_line(kind.__doc__)), "",
                  "| field | type | meaning |", "| --- | --- | --- |", *_event_fields(kind)]
    return "\n".join([*lines, ""])


def _event_fields(kind: type[events.Event]) -> Iterator[str]:
    hints = get_type_hints(kind)
    for name, text in texts_of(events, kind.__name__).items():
        yield table_row(f"`{name}`", _json_type(hints[name]), text)


def _json_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    names = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null",
             tuple[str, ...]: "list of texts"}
    return names[hint] if hint in names else " or ".join(names[each] for each in get_args(hint))
