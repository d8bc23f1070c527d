"""The page about the Python API."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import commlayer
from commlayer import balance, compressors, optim, planner
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.engine.observers.inspection import Inspection
from commlayer.integrations import tracking
from reference_pages.markdown import MADE, WIDTH, wrap

SECTIONS: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    ("Compressors", "commlayer.compressors", compressors, (*FACTORIES, "two_way", "wrap", "parse", "runs_on")),
    ("Optimizers", "commlayer.optim", optim, tuple(optim.__all__)),
    ("Batch shares", "commlayer.balance", balance, tuple(balance.__all__)),
    ("Planner", "commlayer.planner", planner, tuple(planner.__all__)),
    ("Trackers", "commlayer.integrations.tracking", tracking, ("log_to", "scalars")),
)

INSPECT = ("plan", "decisions", "events", "laps", "trace", "members", "may_leave", "exchanged_steps")
"""Of session.inspect. The rest is for components such as samplers."""


def api() -> str:
    lines = [
        "# Python API", "", MADE, "",
        *wrap("Most scripts need `commlayer.attach()` and the session that it returns. `import commlayer` loads a name when "
               "it is first used. Settings are in [settings.md](settings.md), errors in "
               "[errors.md](errors.md), codecs with their bits in [codecs.md](codecs.md). Other names are internal."),
        "", "## commlayer",
    ]
    for name in ("attach", "LocalSteps", "DiLoCo"):
        lines += _entry(f"commlayer.{name}", getattr(commlayer, name))
    lines += _class("commlayer.Session", commlayer.Session, signature=False)
    lines += _class("session.inspect", Inspection, signature=False, members=INSPECT)
    lines += _entry("commlayer.HookState", commlayer.HookState)
    lines += _entry("commlayer.comm_hook", commlayer.comm_hook)
    lines += _class("commlayer.LoadBalancer", commlayer.LoadBalancer)
    lines += _entry("commlayer.CommError", commlayer.CommError, signature=False)
    lines += ["", "### commlayer.Config", "", "The settings of one process, as a record: see [settings.md](settings.md)."]
    for title, prefix, module, names in SECTIONS:
        lines += ["", f"## {title}: {prefix}", ""]
        for name in sorted(names, key=lambda name: name == "Sampler"):
            item = getattr(module, name)
            lines += _class(f"{prefix}.{name}", item) if name == "Sampler" else _item(name, item)
    lines += ["", *wrap("Integrations with transformers, Accelerate and Lightning are on the page "
                         "[frameworks](../how-to/frameworks.md).")]
    return "\n".join([*lines, ""])


def _entry(name: str, item: Any, *, signature: bool = True, brief: bool = False) -> list[str]:
    text = _doc(item, brief=brief)
    if inspect.isclass(item) and "__init__" in vars(item) and vars(item)["__init__"].__doc__ and not brief:
        text += ["", *_doc(vars(item)["__init__"])]
    shown = _signature(name, item) if signature and not _plain_record(item) else []
    return ["", f"### {name}", *(["", "```python", *shown, "```"] if shown else []), *(["", *text] if text else [])]


def _item(name: str, item: Any) -> list[str]:
    """One item of a list: the call and the first paragraph of its docstring."""
    text, call = " ".join(_doc(item, brief=True)), " ".join(line.strip() for line in _signature(name, item))
    call = call.replace("( ", "(").replace(" )", ")")
    return textwrap.wrap(f"- `{call}`{': ' if text else ''}{text}", WIDTH, subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False)


def _class(name: str, kind: type, *, signature: bool = True, members: tuple[str, ...] = ()) -> list[str]:
    """With its public methods and properties, or with these."""
    lines = _entry(name, kind, signature=signature)
    for member in members or vars(kind):
        value = vars(kind)[member]
        if member.startswith("_") or not (callable(value) or isinstance(value, property)):
            continue
        function = value.fget if isinstance(value, property) else value
        if not function.__doc__:
            continue
        text = _doc(function)
        shown = f"`{member}`" if isinstance(value, property) else f"`{_call(member, function)}`"
        lines += ["", f"**{shown}** {text[0]}", *text[1:]]
    return lines


def _plain_record(item: Any) -> bool:
    return inspect.isclass(item) and issubclass(item, BaseException)


def _signature(name: str, item: Any) -> list[str]:
    try:
        parameters = list(inspect.signature(item).parameters.values())
    except (TypeError, ValueError):
        return []
    short = f"{name}({', '.join(_parameters(parameters))})"
    return [short] if len(short) <= WIDTH else [
        f"{name}(", *textwrap.wrap(", ".join(_parameters(parameters)), WIDTH, initial_indent="    ", subsequent_indent="    ",
                                   break_long_words=False, break_on_hyphens=False), ")"]


def _call(name: str, function: Callable[..., Any]) -> str:
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return f"{name}({', '.join(_parameters(parameters))})"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Names and defaults without types. Defaults that are objects are left out."""
    keyword = False
    for each in parameters:
        if each.name == "self":
            continue
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not keyword:
            keyword = True
            yield "*"
        star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(each.kind, "")
        keyword = keyword or star == "*"
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}"
        if re.match(r"=(<|[A-Z]\w*\()", default):
            default = "=..."
        yield f"{star}{each.name}{default}"


def _doc(item: Any, *, brief: bool = False) -> list[str]:
    """Its docstring as Markdown: examples become code."""
    text = inspect.cleandoc(item.__doc__ or "")
    if not text or (inspect.isclass(item) and re.match(r"^\w+\(.*\)$", text)):
        return []
    lines: list[str] = []
    for paragraph in text.split("\n\n")[: 1 if brief else None]:
        if paragraph.lstrip().startswith(">>>"):
            code = [re.sub(r"^(>>> ?|\.\.\. ?)", "", line) for line in paragraph.splitlines()]
            lines += ["", "```python", *(re.sub(r" +# doctest: .*$", "", line) for line in code), "```"]
        elif paragraph.startswith("- "):
            lines += ["", *paragraph.splitlines()]
        else:
            lines += ["", *wrap(" ".join(paragraph.split()))]
    return lines[1:]
