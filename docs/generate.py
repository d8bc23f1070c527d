"""Writes the pages of docs/reference that come from the code: see PAGES.

`make docs` runs `python docs/generate.py`. tests/unit/test_docs.py fails while a page is not current.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

import commlayer
from commlayer import balance, compressors, optim, planner
from commlayer.cli.main import app
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.config import settings as config
from commlayer.engine.observers.inspection import Inspection
from commlayer.errors import CODES
from commlayer.integrations import tracking
from commlayer.observe import event_files, events

FOLDER = Path(__file__).parent / "reference"
WIDTH = 124
MADE = "<!-- Generated from the code by `make docs`; do not edit. -->"

# ---- settings

def settings() -> str:
    fields = config.Config.__struct_fields__
    if sorted(fields) != sorted(name for names in config.GROUPS.values() for name in names):
        raise ValueError(f"config/settings.py: GROUPS names other settings than Config has: {sorted(fields)}")
    hints, texts, defaults = get_type_hints(config.Config, include_extras=True), _texts_of(config, "Config"), config.Config()
    lines = [
        "# Settings", "", MADE, "",
        *_wrap("A job runs with the defaults; settings change deadlines, limits and addresses. They are read from these "
               "sources, and the first one that has the setting wins: `attach(..., config={...})`, the environment "
               "(`COMMLAYER_` and the name in capitals, such as `COMMLAYER_BIND`), `commlayer.toml` in the current directory "
               "or the file that `COMMLAYER_CONFIG` names, and the default. Commands have options for some settings; see "
               "[cli.md](cli.md). Few users need the settings under Expert."), "",
        *_wrap("**Same**: the value must be equal on all ranks. **All**: set it on all ranks or on none."),
    ]
    for group, names in config.GROUPS.items():
        lines += ["", f"## {group}", "", "| setting | default | allowed | ranks | meaning |", "| --- | --- | --- | --- | --- |"]
        for name in names:
            allowed = next(m.description for m in hints[name].__metadata__ if getattr(m, "description", None))
            default = getattr(defaults, name)
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            ranks = "Same" if name in config.ALIKE else "All" if name in config.ALIKE_SET else ""
            lines.append(_row(f"`{name}`", f"`{shown}`" if shown else "", allowed, ranks, texts[name]))
    return "\n".join([*lines, ""])


def _texts_of(module: ModuleType, kind: str) -> dict[str, str]:
    """By field of the module's class `kind`, the string below it, in one line."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    texts = {}
    for field, text in zip(body, [*body[1:], body[0]], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)):
                raise ValueError(f"{module.__name__}: {kind}.{field.target.id} has no text below it")
            texts[field.target.id] = " ".join(text.value.value.split())
    return texts


# ---- errors


def errors() -> str:
    return "\n".join((
        "# Error codes", "", MADE, "",
        "Every error message ends with a code in brackets, such as `[E-DEADLINE]`. Messages may change; codes do not.", "",
        "In Python, `error.code` holds the code. Errors of the network are `commlayer.CommError`. Errors of arguments, files",
        "and settings are `ValueError`. Calls at the wrong time are `RuntimeError`. A command that fails with one of them",
        "prints one line and ends with exit code 2.", "",
        "| code | meaning | remedy |", "| --- | --- | --- |",
        *(_row(f"`{code}`", meaning, remedy) for code, (meaning, remedy) in CODES.items()), ""))


# ---- events


def event_kinds() -> str:
    lines = [
        "# Events", "", MADE, "",
        *_wrap("While a job runs, its processes append events to a stream: one JSON object a line. "
               "`commlayer top`, the metrics and reports read it. [watch.md](../how-to/watch.md) shows how to get it."), "",
        *_wrap("A reader ignores kinds and fields that it does not know. Fields are never renamed or removed without another "
               "`format` in the event `job`. Times in a coordinator's stream refer to the coordinator's clock."), "",
        "| file | who writes it | contents |", "| --- | --- | --- |",
        "| `rank-N.jsonl` | each rank, with the setting `events` (`COMMLAYER_EVENTS=DIR`) | its own events; those that all "
        "ranks know are in rank 0's |",
        "| `events.jsonl` | `commlayer serve --events DIR` | the events of all members and the coordinator's |", "",
        *_wrap(f"A text has at most {events.MAX_TEXT_CHARS} characters. Writing stops when a file has "
               f"{event_files.MAX_FILE_NBYTES >> 30} GiB."), "",
        "| field of every event | type | meaning |", "| --- | --- | --- |",
        _row("`event`", "text", "The kind."), *_event_fields(events.Event),
    ]
    for kind in events.KINDS:
        lines += ["", f"## {kind.__struct_config__.tag}", "", *_wrap(_one_line(kind.__doc__)), "",
                  "| field | type | meaning |", "| --- | --- | --- |", *_event_fields(kind)]
    return "\n".join([*lines, ""])


def _event_fields(kind: type[events.Event]) -> Iterator[str]:
    hints = get_type_hints(kind)
    for name, text in _texts_of(events, kind.__name__).items():
        yield _row(f"`{name}`", _json_type(hints[name]), text)


def _json_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    names = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null",
             tuple[str, ...]: "list of texts"}
    return names[hint] if hint in names else " or ".join(names[each] for each in get_args(hint))


# ---- commands


def cli() -> str:
    lines = [
        "# Commands", "", MADE, "",
        *_wrap("Every command of `commlayer` with its arguments and options. A mistake in one of them, or in a file, is "
               "one line and exit code 2. `commlayer COMMAND --help` prints the same "
               "texts. `commlayer --install-completion` adds completion to the shell."),
    ]
    return "\n".join([*lines, *_command("commlayer", typer.main.get_command(app)), ""])


def _command(name: str, command: Any) -> Iterator[str]:
    parameters = [parameter for parameter in command.params if "--help" not in parameter.opts and not parameter.hidden]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    if hasattr(command, "commands"):
        if name != "commlayer":
            yield from ("", f"## {name}", "", *_wrap(_one_line(command.help)))
        for each in (each for each in command.commands.values() if not each.hidden):
            yield from _command(f"{name} {each.name}", each)
        return
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_place, arguments)])
    yield from ("", f"{'##' if name.count(' ') == 1 else '###'} {name}", "", f"`{usage}`", "", *_wrap(_one_line(command.help)))
    if arguments or options:
        yield from ("", "| argument or option | value | default | meaning |", "| --- | --- | --- | --- |")
    for each in arguments:
        yield _row(f"`{_place(each)}`", "", _default(each), _one_line(each.help))
    for each in options:
        value, default = ("", "") if each.is_flag else (f"`{_value(each)}`", _default(each))
        yield _row(f"`{each.opts[0]}`", value, default, _one_line(each.help))


def _place(argument: Any) -> str:
    name = argument.metavar.strip("{}[]") if argument.metavar else argument.name.upper()
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _value(option: Any) -> str:
    """The option's metavar, or one for the type of its default."""
    kinds = ((int, "N"), (float, "X"), (Path, "PATH"))
    return option.metavar or next((name for kind, name in kinds if isinstance(option.default, kind)), "TEXT")


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value is None or value == "" or callable(value) or isinstance(value, bool) else f"`{value}`"


# ---- Python


SECTIONS: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    ("Compressors", "commlayer.compressors", compressors, (*FACTORIES, "two_way", "wrap", "parse", "runs_on")),
    ("Optimizers", "commlayer.optim", optim, tuple(optim.__all__)),
    ("Batch shares", "commlayer.balance", balance, tuple(balance.__all__)),
    ("Planner", "commlayer.planner", planner, tuple(planner.__all__)),
    ("Trackers", "commlayer.integrations.tracking", tracking, ("log_to", "scalars")),
)


INSPECT = ("plan", "decisions", "events", "laps", "trace", "members", "may_leave", "carried")
"""Of session.inspect. The rest is for components such as samplers."""


def api() -> str:
    lines = [
        "# Python API", "", MADE, "",
        *_wrap("Most scripts need `commlayer.attach()` and the session that it returns. `import commlayer` loads a name when "
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
    lines += ["", *_wrap("Integrations with transformers, Accelerate and Lightning are on the page "
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
            lines += ["", *_wrap(" ".join(paragraph.split()))]
    return lines[1:]


# ---- support


def support() -> str:
    root = Path(__file__).parents[1]
    sys.path.append(str(root / "tests"))
    from support import matrix

    direct = (root / "constraints.txt").read_text().partition("# ----")[0]
    pinned = [line.replace("==", " ") for line in direct.splitlines() if "==" in line]
    lines = [
        "# What works", "", MADE, "",
        *_wrap("What was tried with commlayer, and what came out: scripts, models, optimizers, kinds of jobs and "
               "machines."), "",
        *_wrap(f"As of {matrix.AS_OF}. **Works** means that tests show it, on Linux with CPUs and two or more processes, with "
               f"Python 3.11, {', '.join(pinned)}. **No GPU has run the GPU code yet.**"),
        "", "## Features and kinds of jobs", "",
        *_wrap("Each cell is a case of `tests/multi/test_features.py`: all workers use the feature and end with equal weights. "
               "Where homes come and go, one home is killed inside a step. Then another one joins, except with frameworks, "
               "`session.join()` and checkpoints. A code is that of the error with which the job ends instead."), "",
        _row("feature", *matrix.KINDS.values(), "further tests"), _row(*["---"] * (len(matrix.KINDS) + 2)),
        *(_row(feature.title, *(f"`{matrix.REFUSED[name, kind].code}`" if (name, kind) in matrix.REFUSED else "yes"
                                for kind in matrix.KINDS), ", ".join(f"`{file}`" for file in feature.tests))
          for name, feature in matrix.FEATURES.items()), "",
        "Reasons of these errors:", "", *_refusals(matrix.FEATURES, matrix.KINDS, matrix.REFUSED),
    ]
    for title, rows in matrix.TABLES.items():
        lines += ["", f"## {title}", "", "| subject | verdict | what was tried | tests |", "| --- | --- | --- | --- |"]
        for row in rows:
            names: dict[str, list[str]] = {}
            for file, name in (test.split("::") for test in row.tests):
                names.setdefault(file, []).append(name)
            lines.append(_row(row.subject, row.verdict, row.how, "; ".join(
                f"`{file}`: {', '.join(each)}" for file, each in names.items())))
    return "\n".join([*lines, ""])


def _refusals(features: dict[str, Any], kinds: dict[str, str], refused: dict[tuple[str, str], Any]) -> Iterator[str]:
    """One item for each reason in a kind of job."""
    titles: dict[tuple[str, str], list[str]] = {}
    for (feature, kind), refusal in refused.items():
        titles.setdefault((kinds[kind], refusal.why), []).append(features[feature].title)
    for (kind, why), refused_there in titles.items():
        yield from textwrap.wrap(f"- {kind}, {', '.join(refused_there)}: {why}.", WIDTH, subsequent_indent="  ",
                                 break_long_words=False, break_on_hyphens=False)


# ---- text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


PAGES = {"api.md": api, "cli.md": cli, "settings.md": settings, "errors.md": errors, "events.md": event_kinds,
         "support.md": support}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
