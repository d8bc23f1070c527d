"""`commlayer plan`: makes, explains, compares, varies and checks plans. Needs no GPU and no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import structs

from commlayer.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commlayer.records import Job, Plan

app = typer.Typer(no_args_is_help=True, help="Plan a job's communication from tables or measurements: no GPU needed.")

PLAN = Path("plan.json")

Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.", metavar="FILE")]
Loss = Annotated[str, typer.Option(help="A loss model from `commlayer tune`.", metavar="FILE")]
Learning = Annotated[str, typer.Option(help="Convergence factors from `python -m bench.own_learning`.", metavar="FILE")]
PlanFile = Annotated[Path, typer.Option("--plan", help="The plan; its inputs are next to it.", metavar="FILE")]


@app.command()
def make(
    model: Annotated[str, typer.Argument(
        help="A built-in model such as bert-base, a job file (.json), or FILE.py[:FUNCTION], which returns (model, loss).",
    )],
    cluster: Annotated[str, typer.Option(help="The machines, as TOML or JSON.", metavar="FILE")] = "",
    nodes: Annotated[str, typer.Option(help='The machines in a line: "3xrtx3060@100/20Mb,rtx4090@1Gb".', metavar="LINE")] = "",
    homes: Annotated[str, typer.Option(
        help='The same, behind NAT with one rented server: "3xrtx3060@100/20Mb" (down/up).', metavar="LINE")] = "",
    server: Annotated[str, typer.Option(help="The link of that server; default 1Gb.", metavar="RATE")] = "",
    profile: Annotated[str, typer.Option(help="Measured costs instead of the tables'.", metavar="FILE")] = "",
    batch: Annotated[int | None, typer.Option(help="Samples per worker; default: the usual batch.", metavar="N")] = None,
    codec: Annotated[list[str] | None, typer.Option(help="Allow only this codec; may be repeated.")] = None,
    max_loss: Annotated[str, typer.Option(
        help="Allowed increase of the loss after equally many steps: 0.01, or 1%.", metavar="PART")] = "",
    loss: Loss = "",
    learning: Learning = "",
    optimizer: Annotated[str, typer.Option(
        help="adamw (default), sgd, or any (the worse of both).", metavar="NAME")] = "",
    objective: Annotated[str, typer.Option(help="Minimize seconds to a loss, or seconds of a step.")] = "loss",
    exact: Annotated[bool, typer.Option("--exact", help="Synchronous training only: no local steps, nothing stale.")] = False,
    forward: Annotated[bool, typer.Option("--forward", help="Allow results during the next forward pass.")] = False,
    max_local_steps: Annotated[int, typer.Option(help="Most local steps per exchange; 0: as many as pay.")] = 0,
    fragments: Annotated[bool, typer.Option(
        "--fragments", help="Allow fragments between homes; not for jobs with --min-workers.")] = False,
    staleness: Annotated[bool, typer.Option("--staleness", help="Allow one-step-stale results.")] = False,
    cpu_only: Annotated[bool, typer.Option("--cpu-only", help="Run no codec on a GPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan there, and its inputs next to it.", metavar="FILE")] = None,
    json: Json = None,
) -> None:
    """Find the plan that reaches a loss first, with the reason for each bucket."""
    from commlayer import plan_file, records
    from commlayer.cli import arguments, plan_output
    from commlayer.planner.convergence import measured_local_steps
    from commlayer.planner.explanation import beside, looser
    from commlayer.planner.model import NO_LIMIT, Policy
    from commlayer.planner.search import Search
    from commlayer.planner.simulation import simulate
    from commlayer.planner.tables import at_precision, learning_rows
    from commlayer.planner.tensors import untouched

    arguments.check_json(json)
    if exact and (max_local_steps > 1 or staleness):
        other_option = f"--max-local-steps {max_local_steps}" if max_local_steps > 1 else "--staleness"
        raise InvalidInput("E-CLI-OPTION", f"--exact and {other_option}: that is not synchronous SGD; leave one of the two out")
    if out is not None:
        arguments.check_out(out)
        arguments.check_out(plan_file.sidecar(out))
    machines = arguments.cluster_named(cluster, nodes, homes, server)
    job = arguments.job_named(model, batch)
    half = job.timing is not None and job.timing.half
    machines = structs.replace(machines, nodes=at_precision(machines.nodes, half=half))
    measured = arguments.profile_named(profile)
    goals = Policy(codecs=arguments.codecs_named(codec or [], measured),
                   max_loss=arguments.loss_part("--max-loss", max_loss) if max_loss else NO_LIMIT,
                   objective=arguments.objective_named(objective),
                   optimizer=arguments.optimizer_named(optimizer or "adamw"),
                   exact=exact, forward=forward, devices=("cpu",) if cpu_only else ("gpu", "cpu"),
                   max_local_steps=max_local_steps, staleness=staleness,
                   # Jobs between homes run with --min-workers, which supports whole exchanges only.
                   fragments=machines.reachable or fragments)
    inputs = plan_file.PlanFileInputs(job, machines, measured, goals, arguments.loss_named(loss),
                                      arguments.learning_named(learning))
    costs, policy = inputs.costs()
    search = Search(job, machines, costs, policy)
    result = search.explained(search.best(exact=goals.exact))
    synchronous = None if plan_output.is_synchronous(result) else search.explained(search.best(exact=True))
    if out is not None:
        arguments.write({plan_file.sidecar(out): records.encode(inputs).decode() + "\n", out: plan_file.written(result)})
    arguments.write_json(json, records.encode(result).decode())
    console = plan_output.console_of()
    for line in (plan_output.title(result, job, machines), "assumed", *(f"  {line}" for line in
                plan_output.assumptions(model, job, machines, goals.optimizer, named=bool(optimizer)))):
        console.print(line, markup=False)
    console.print(plan_output.summary(result, job, machines, simulate(result, job, machines, costs, policy)), markup=False)
    for part in plan_output.to_a_loss(beside(result, job, machines, costs, policy, synchronous), result.steps > 0):
        console.print(part)
    if result.steps > 0:
        console.print(plan_output.spread(arguments.learning_table(learning, measured), goals.optimizer))
        limit = measured_local_steps(costs.learning if costs is not None else learning_rows())
        if result.local_steps > limit:
            console.print(f"x steps: measured up to {limit} local steps; for {result.local_steps} it is extrapolated")
    console.print(plan_output.by_decision(result, job, console.width))
    for line in (*untouched(result, job), *plan_output.held_up(looser(result, job, machines, costs, policy))):
        console.print(line, markup=False)
    if out is not None:
        console.print(f"plan {records.digest(result)} is in {out}, what it was made from in {plan_file.sidecar(out)}",
                      markup=False)


@app.command()
def explain(
    bucket: Annotated[str, typer.Argument(help="A bucket's number, or the name of a tensor in it.")],
    plan: PlanFile = PLAN,
    json: Json = None,
) -> None:
    """Explain a bucket: path, codec, cost and runner-up."""
    from commlayer import plan_file, records
    from commlayer.cli import arguments, plan_output
    from commlayer.planner.explanation import bucket_of
    from commlayer.planner.explanation import explain as explained

    arguments.check_json(json)
    record, inputs = plan_file.plan_in(plan), plan_file.inputs_of(plan)
    _refuse(record, inputs.job)
    result = explained(record, bucket_of(record, inputs.job, bucket), inputs.job, inputs.cluster, *inputs.costs())
    arguments.write_json(json, records.encode(result).decode())
    _print(lambda width: plan_output.explanation(result, width))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.")],
    after: Annotated[Path, typer.Argument(help="Another plan of the same model.")],
    json: Json = None,
) -> None:
    """Show the differences of two plans by tensor. Exit code 1 if they differ."""
    from commlayer import plan_file, records
    from commlayer.cli import arguments, plan_output
    from commlayer.planner.explanation import diff as differ

    arguments.check_json(json)
    beside = plan_file.sidecar(before)
    job = plan_file.inputs_of(before).job if beside.is_file() else None
    result = differ(plan_file.plan_in(before), plan_file.plan_in(after), job)
    arguments.write_json(json, records.encode(result).decode())
    _print(lambda _: plan_output.difference(result, str(before), str(after)))
    raise typer.Exit(0 if result.equal else 1)


@app.command()
def whatif(
    plan: PlanFile = PLAN,
    add_node: Annotated[list[str] | None, typer.Option(help="One more machine with this GPU; may be repeated.")] = None,
    link: Annotated[str, typer.Option(help='The added machines\' link: "100/20Mb" (down/up), "1Gb", "10g".')] = "",
    bandwidth: Annotated[str, typer.Option(help='Every link at these rates: "10Mb,100Mb,1Gb".', metavar="RATES")] = "",
    nodes: Annotated[str, typer.Option(help='This many nodes like the last one: "2,4,8".', metavar="COUNTS")] = "",
    gpu: Annotated[str, typer.Option(help='These GPUs in all nodes: "rtx3060,rtx4090".', metavar="NAMES")] = "",
    loss: Loss = "",
    learning: Learning = "",
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve to this file.", metavar="PNG")] = None,
    json: Json = None,
) -> None:
    """Plan the same job on other machines: gains, and the link rate below which compression pays."""
    from commlayer import plan_file, records
    from commlayer.cli import arguments, plan_output
    from commlayer.planner.explanation import what_if
    from commlayer.planner.inputs import nodes_of, rate_of
    from commlayer.planner.tables import at_precision

    arguments.check_json(json)
    if bool(add_node) != bool(link):
        raise InvalidInput("E-CLI-OPTION", "--add-node GPU and --link RATE go together: the new machine needs both")
    options = [name for name, value in
               (("--add-node", add_node), ("--bandwidth", bandwidth), ("--nodes", nodes), ("--gpu", gpu)) if value]
    if len(options) != 1:
        raise InvalidInput("E-CLI-OPTION",
                           "say one thing to vary: --add-node GPU --link RATE, --bandwidth RATES, --nodes COUNTS or --gpu "
                           f"NAMES; got {' and '.join(options) or 'none'}")
    if plot is not None:
        plan_output.check_plot(plot)
    inputs = plan_file.inputs_of(plan)
    if loss:
        inputs = structs.replace(inputs, loss=arguments.loss_named(loss))
    if learning:
        inputs = structs.replace(inputs, learning=arguments.learning_named(learning))
    last = [node for node in inputs.cluster.nodes if node.ranks][-1]
    grown = nodes_of(",".join(f"{name}@{link}" for name in add_node or ()), first=len(inputs.cluster.nodes)) if add_node else ()
    # The new node resembles the last one: behind NAT if that one is.
    grown = at_precision([structs.replace(node, server=last.server) for node in grown],
                         half=inputs.job.timing is not None and inputs.job.timing.half)
    others = tuple(structs.replace(last, device=name) for name in _listed(gpu))
    curve = what_if(
        inputs.job, inputs.cluster, *inputs.costs((*grown, *others)), add_nodes=grown,
        bandwidths=[rate_of(text) for text in _listed(bandwidth)], counts=[_whole(text) for text in _listed(nodes)],
        gpus=_listed(gpu),
    )
    if plot is not None:
        plan_output.draw(curve, plot)
    arguments.write_json(json, records.encode(curve).decode())
    _print(lambda width: plan_output.curve(curve, width))


@app.command()
def lint(
    plan: Annotated[Path, typer.Argument(help="The plan to check.")],
    job: Annotated[str, typer.Option(help="The plan's model; default: the one next to the plan.")] = "",
    json: Json = None,
) -> None:
    """List all problems of a plan, bucket by bucket. Exit code 2 if there are any."""
    from commlayer import plan_file
    from commlayer.cli import arguments
    from commlayer.errors import RecordError
    from commlayer.planner.plan_lint import lint as linted

    arguments.check_json(json)
    problems, inputs = plan_file.misread(plan_file.text_of(plan, "plan").encode()), None
    plan_ = None if problems else plan_file.plan_in(plan)
    try:
        inputs = plan_file.inputs_of(plan) if plan_file.sidecar(plan).is_file() else None
    except RecordError as error:
        problems.append(str(error))
    of = arguments.job_named(job, None) if job else inputs.job if inputs else None
    if plan_ is not None:
        problems += linted(plan_, of, inputs.cluster if inputs else None, inputs.costs()[0] if inputs else None, _codec_problem)
    arguments.write_json(json, msgspec.json.encode(problems).decode())
    for line in problems or [f"{plan}: nothing wrong"]:
        typer.echo(line)
    raise typer.Exit(2 if problems else 0)


@app.command()
def init(
    out: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("cluster.toml"),
) -> None:
    """Write an example cluster file to edit."""
    from commlayer.cli import arguments
    from commlayer.planner.inputs import EXAMPLE

    if out.exists():
        raise InvalidInput("E-CLI-OPTION", f"{out} exists: name another file")
    arguments.write({out: EXAMPLE})
    typer.echo(f"{out}: edit it, then `commlayer plan make MODEL --cluster {out}`")


def _print(parts: Callable[[int], Iterable[RenderableType]]) -> None:
    """Prints the parts of a page; `parts` takes the page's width."""
    from commlayer.cli.plan_output import console_of

    console = console_of()
    for part in parts(console.width):
        console.print(part)


def _codec_problem(text: str) -> str:
    from commlayer.compressors.plan_codecs import parse

    try:
        parse(text)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _refuse(plan: Plan, job: Job) -> None:
    """Raises if the plan belongs to another model."""
    from commlayer.planner.plan_rules import verify

    problems = verify(plan, job)
    if problems:
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str) -> int:
    if not text.isdigit():
        raise InvalidInput("E-CLI-OPTION", f"--nodes: got {text!r}, allowed: whole numbers such as 2,4,8")
    return int(text)
