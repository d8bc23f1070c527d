"""The page about error codes."""

from __future__ import annotations

import tomllib
from pathlib import Path

from reference_pages.markdown import MADE, table_row

CODES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("error_codes.toml").read_text("utf-8"))


def errors() -> str:
    return "\n".join((
        "# Error codes", "", MADE, "",
        "Every error message ends with a code in brackets, such as `[E-DEADLINE]`. Messages may change; codes do not.", "",
        "In Python, `error.code` holds the code. Errors of the network are `commlayer.CommError`. Errors of arguments, files",
        "and settings are `ValueError`. Calls at the wrong time are `RuntimeError`. A command that fails with one of them",
        "prints one line and ends with exit code 2.", "",
        "| code | meaning | remedy |", "| --- | --- | --- |",
        *(table_row(f"`{code}`", each["meaning"], each["remedy"]) for code, each in CODES.items()), ""))
