"""The page about error codes."""

from __future__ import annotations

from commlayer.errors import CODES
from reference_pages.markdown import MADE, table_row


def errors() -> str:
    return "\n".join((
        "# Error codes", "", MADE, "",
        "Every error message ends with a code in brackets, such as `[E-DEADLINE]`. Messages may change; codes do not.", "",
        "In Python, `error.code` holds the code. Errors of the network are `commlayer.CommError`. Errors of arguments, files",
        "and settings are `ValueError`. Calls at the wrong time are `RuntimeError`. A command that fails with one of them",
        "prints one line and ends with exit code 2.", "",
        "| code | meaning | remedy |", "| --- | --- | --- |",
        *(table_row(f"`{code}`", meaning, remedy) for code, (meaning, remedy) in CODES.items()), ""))
