"""Prints commlayer's log for the user at a terminal."""

from __future__ import annotations

import logging
import shutil
import textwrap

from commlayer.errors import one_line

WIDEST = 100
"""Widest line in characters. A narrower terminal gets lines of its own width."""


class LogLines(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to standard error. On a terminal, long lines are broken between words, and control characters are
    escaped, because a peer may have sent them. In a file each record stays one line, so it can be searched."""

    def __init__(self, name: str) -> None:
        """`name`: the command whose lines these are, for example "commlayer serve"."""
        super().__init__()
        self.setFormatter(logging.Formatter(f"{name}: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.exc_info or not self.stream.isatty():
            return text
        lines = "\n".join(map(one_line, text.split("\n")))
        return wrap_lines(lines, min(WIDEST, shutil.get_terminal_size().columns))


def wrap_lines(text: str, width: int) -> str:
    """Returns the text with lines of at most `width` characters. Words that are longer, and lines that begin with a space,
    which are there to be copied, stay whole.

    >>> print(wrap_lines("serve: paste this at home:\\n  commlayer join SERVER", 20))
    serve: paste this at
      home:
      commlayer join SERVER
    """
    return "\n".join(line if line.startswith(" ") else textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
