"""The command `commlayer`: registers the subcommands and prints user errors as one line. Loads neither torch nor grpc."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from commlayer.cli import keys
from commlayer.cli.demo import demo
from commlayer.cli.doctor import doctor
from commlayer.cli.join import JoinCommand, join, up
from commlayer.cli.pauses import pause, resume
from commlayer.cli.plan import commands as plan
from commlayer.cli.profile import profile
from commlayer.cli.serve import serve
from commlayer.cli.tune import tune
from commlayer.cli.watch.log import log
from commlayer.cli.watch.runs import report, trace
from commlayer.cli.watch.top import top
from commlayer.cluster.calls import messages
from commlayer.errors import Coded, append_code, error_line

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""The exceptions that typer raises for unknown or missing options, arguments and commands. typer does not export this class."""

POSIX_ONLY = ("fcntl", "resource", "termios")
"""Modules of Python's library that Windows lacks."""

app = typer.Typer(
    name="commlayer", no_args_is_help=True, pretty_exceptions_enable=False,
    help="Gradient compression and communication scheduling for PyTorch over slow, uneven networks and GPUs.",
)


def show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"commlayer {messages.version()}")
        raise typer.Exit


@app.callback()
def commlayer(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it and exit.")] = False,
) -> None:
    """Options that precede the command."""


app.command()(demo)
app.command()(plan.estimate)
app.command()(serve)
app.command()(top)
app.command()(log)
app.command()(report)
app.command()(doctor)
app.command(cls=JoinCommand, context_settings={"allow_interspersed_args": False})(join)
app.command(context_settings={"allow_interspersed_args": False})(up)
app.command()(pause)
app.command()(resume)
app.command()(tune)
app.command()(profile)
app.command()(trace)
app.add_typer(plan.app, name="plan")
app.add_typer(keys.app, name="keys")


def describe_usage(error: Any) -> str:
    """Returns the text of an error about the command line. Adds the value of an option, which typer's text lacks."""
    text = " ".join(error.format_message().split()).rstrip(".")
    _, found, allowed = text.partition(": Input should be ")
    words = sys.argv[1:]
    got = next((word.partition("=")[2] or words[place + 1] for place, word in enumerate(words)
                if found and word.partition("=")[0] in error.param.opts), "")
    return f"{error.param.opts[0]}: got {got}, allowed: {allowed}" if got else text


def run() -> None:
    """The entry point. Exit codes: 0 success, 1 differences that `plan diff` found, 2 an error that the user can fix (one line
    describes it), 130 Ctrl-C or the end of input at a question."""
    try:
        sys.exit(app(prog_name="commlayer", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        if message := describe_usage(error):  # empty if the help was printed because there were no arguments
            page = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
            print(f"commlayer: {message}{page} [E-CLI-OPTION]", file=sys.stderr)
        sys.exit(2)
    except (Coded, ValueError, OSError) as error:
        print(f"commlayer: {error_line(error)}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in POSIX_ONLY:
            raise
        needs = "this command needs Linux; on Windows use WSL 2. `commlayer estimate` and `commlayer plan` run anywhere"
        print("commlayer:", append_code("E-SYSTEM", needs), file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


if __name__ == "__main__":
    run()
