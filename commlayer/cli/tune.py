"""`commlayer tune`: searches codec, ratio, batch and other settings with short proxy trainings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from commlayer.balance import loss_model, tuner
from commlayer.balance.tuner import CODECS, Search, SearchSpace, Settings, Store, TuningTrial, default_space, proxy_settings
from commlayer.cli.arguments import import_function, loss_part, whole_numbers
from commlayer.cli.options import Codecs, Out
from commlayer.errors import InvalidInput


def tune(
    task: Annotated[str, typer.Argument(help="A file.py with proxy(settings), or module:function.")],
    trials: Annotated[int, typer.Option(help="Number of proxy runs, including earlier ones in --store.", min=1)] = 30,
    budget: Annotated[str, typer.Option(
        help="Allowed increase of the loss over uncompressed training: 0.005, or 0.5%.", metavar="PART")] = "0.005",
    codec: Codecs = None,
    ratio: Annotated[str, typer.Option(help="Range of the ratio.", metavar="LOW:HIGH")] = "0.001:0.3",
    batches: Annotated[str, typer.Option(help="Global batch sizes to try.", metavar="N,N,...")] = "64,128,256",
    local_steps: Annotated[str, typer.Option(help="Local steps to try; 1 is always tried.", metavar="N,N,...")] = "1",
    staleness: Annotated[bool, typer.Option("--staleness", help="Also try one-step-stale results.")] = False,
    method: Annotated[str, typer.Option(help="Search method: bayesian, or nelder-mead.")] = tuner.METHODS[0],
    store: Annotated[Path, typer.Option(help="Trials, one JSON line each; later calls add to it.")] = Path("tune.jsonl"),
    out: Out = Path("loss.json"),
) -> None:
    """Find the fastest settings within a loss budget by short proxy trainings; write a loss model for plan create --loss."""
    if method not in tuner.METHODS:
        raise InvalidInput("E-CLI-OPTION", f"--method {method!r}: allowed are {', '.join(tuner.METHODS)}")
    part = loss_part("--budget", budget, above_0=True)
    for path in (store, out):
        if not path.absolute().parent.is_dir():
            raise InvalidInput("E-CLI-OPTION", f"{path}: the folder {path.absolute().parent} does not exist")
    space = read_space(tuple(codec or CODECS), ratio, batches, local_steps, staleness=staleness)
    if method == "bayesian" and importlib.util.find_spec("skopt") is None:
        raise InvalidInput("E-PACKAGE", 'the bayesian search needs scikit-optimize: pip install "commlayer[tune]"')
    # Imported late: these load numpy and scikit-optimize, and --help must be fast.
    from commlayer.balance.tuner import Engine

    engine, proxy = Engine(space, 0, method), load(task)
    search = Search(task, space, part)
    trial_store = Store(store, search)
    _show(tuner.tune(proxy, trial_store, search, engine, trials), trial_store, search, trials)
    loss_model.write(out, tuner.loss_model(trial_store.trials))
    _print_best(trial_store, search, out)


def read_space(
    codecs: tuple[str, ...], ratio: str, batches: str, local_steps: str = "1", *, staleness: bool = False,
) -> SearchSpace:
    """Parses the options that define the search space. An error names its option."""
    try:
        low, high = (float(part) for part in ratio.split(":"))
    except ValueError:
        raise InvalidInput("E-CLI-OPTION", f"--ratio {ratio!r}: allowed is LOW:HIGH, such as 0.001:0.3") from None
    sizes, steps = (tuple(sorted(set(whole_numbers(option, text, such_as)))) for option, text, such_as in (
        ("--batches", batches, "64,128,256"), ("--local-steps", local_steps, "1,2,4")))
    space = default_space(codecs=codecs, ratio=(low, high), batches=sizes, local_steps=steps, staleness=staleness)
    # Imported late: it loads numpy, which --help does not need.
    from commlayer.compressors import parse

    for spelling in codecs:
        try:
            parse(spelling.replace("{ratio}", f"{high:g}"))
        except (TypeError, ValueError) as error:
            raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None
    return space


def load(task: str) -> tuner.Proxy:
    return import_function(task, "proxy", "that takes settings and returns seconds and loss")


def _show(running: Iterator[TuningTrial], store: Store, search: Search, trials: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(highlight=False)
    if store.trials:
        console.print(f"{store.path}: continuing after {len(store.trials)} trials", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        row = bar.add_task("proxy runs", total=trials, completed=min(trials, len(store.trials)))
        for trial in running:
            console.print(line(len(store.trials), trial, store.trials[0]), markup=False, soft_wrap=True)
            best = tuner.best(store.trials, search.budget)
            bar.update(row, completed=len(store.trials), description=f"best {best.seconds:.3g} s")


def line(number: int, trial: TuningTrial, dense: TuningTrial) -> str:
    settings = proxy_settings(trial.settings)
    what = f"{number:3}  batch {settings['batch']:<5} {settings['codec'] + describe_inexact_settings(settings):44}"
    if trial.error:
        return f"{what} failed: {trial.error}"
    return f"{what} {trial.seconds:8.3g} s  loss {trial.loss:.4g} ({tuner.excess(trial, dense):+.2%})"


def describe_inexact_settings(settings: Settings) -> str:
    """Describes settings other than the codec that change training results: local steps, staleness."""
    steps = f", {settings['local_steps']} local steps" if settings.get("local_steps", 1) > 1 else ""
    return steps + (", a step late" if settings.get("stale") else "")


def _print_best(store: Store, search: Search, out: Path) -> None:
    best, dense = tuner.best(store.trials, search.budget), store.trials[0]
    settings = proxy_settings(best.settings)
    typer.echo(f"best within {search.budget:.2%}: {settings['codec']}, batch "
               f"{settings['batch']}{describe_inexact_settings(settings)}: "
               f"{best.seconds:.3g} s, dense {dense.seconds:.3g} s; loss {tuner.excess(best, dense):+.2%}")
    typer.echo(f"trials in {store.path}, loss model in {out}: commlayer plan create --loss {out}")
