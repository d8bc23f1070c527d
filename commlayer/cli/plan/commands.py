"""`commlayer estimate` and `commlayer plan`: create, explain, compare, vary and check plans, without GPU and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from commlayer.cli.options import Batch, Codecs, Json, NoiseScale, Out
from commlayer.cli.output import Commands, Notes, Part, Report, check_out, publish, write
from commlayer.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Plan a job's communication from tables or measurements: no GPU needed.")

PLAN = Path("plan.json")

Model = Annotated[str, typer.Argument(
    help="A built-in model such as bert-base, a job file (.json), or FILE.py[:FUNCTION], which returns (model, loss).")]
Nodes = Annotated[str, typer.Option(help='The machines in a line: "3xrtx3060@100/20Mb,rtx4090@1Gb".', metavar="LINE")]
Homes = Annotated[str, typer.Option(
    help='Machines behind NAT, with one rented server: "3xrtx3060@100/20Mb" (down/up).', metavar="LINE")]
Server = Annotated[str, typer.Option(help="The link of the server for --homes; default 1Gb.", metavar="RATE")]
ClusterFile = Annotated[str, typer.Option("--cluster", help="A file with the machines, as TOML or JSON.", metavar="FILE")]
Optimizer = Annotated[str, typer.Option(
    help="adamw (default), sgd, muon, lion, or any (the worse of adamw and sgd).", metavar="NAME")]
Sync = Annotated[str, typer.Option(help="auto (any sync mode), or step (synchronous training only).", metavar="MODE")]
PlanFile = Annotated[Path, typer.Option("--plan", help="The plan file; its inputs must be next to it.", metavar="FILE")]
Steps = Annotated[int | None, typer.Option(
    help="Length of the training in steps of all machines together, for hours, GPU-hours and kWh.", metavar="N", min=1)]
PricedServer = Annotated[str, typer.Option(
    help='The link of the server for --homes; default 1Gb. With --steps also its price per hour: "1Gb,0.04".',
    metavar="RATE[,PRICE]")]
Costs = Annotated[str, typer.Option(
    "--profile", help="Costs of codecs, measured by `commlayer profile`; its job file, as MODEL, has measured step times.",
    metavar="FILE")]
ALLOWED = ("forward", "staleness")


def estimate(
    model: Model, nodes: Nodes = "", homes: Homes = "", server: PricedServer = "", cluster: ClusterFile = "",
    batch: Batch = None, optimizer: Optimizer = "", sync: Sync = "auto", profile: Costs = "", noise_scale: NoiseScale = None,
    steps: Steps = None, json: Json = None,
    verbose: Annotated[bool, typer.Option("-v", help="Also print the sources of the factors, and the buckets.")] = False,
) -> None:
    """Estimate how much faster training is on these machines than on the fastest one alone."""
    from commlayer.cli import arguments
    from commlayer.cli.plan import report as plan_report
    from commlayer.cli.plan.planned_job import planned_job, policy_for_sync
    from commlayer.planner.baselines import Verdict, training_costs
    from commlayer.planner.convergence import measured_local_steps
    from commlayer.planner.data.tables import learning_rows

    server, price = arguments.server_price(server, steps)
    machines = arguments.cluster_named(cluster, nodes, homes, server)
    policy = policy_for_sync(sync, optimizer)
    if not policy.exact:  # as in a running job
        policy = structs.replace(policy, max_local_steps=measured_local_steps(learning_rows()))
    measured = arguments.profile_named(profile)
    planned = planned_job(model, machines, batch, optimizer, policy, measured, noise_scale, by_speed=True)
    rows, gain = planned.alternatives()
    costs = training_costs(rows, planned.inputs.cluster, steps, price) if steps else ()
    headline, unfit = planned.headline(gain), planned.unfit
    result = Verdict(headline, *((gain.plan, gain.cautious, gain.high, gain.step) if unfit is None else (0.0,) * 4), rows,
                     planned.assumptions, planned.plan, costs)
    if unfit is not None:
        publish(Report(result, headline, (Notes("assumed", planned.assumptions), f"Instead: {unfit.remedy}.")), json)
        return
    parts: list[Part] = []
    if gain.plan:
        parts.append(plan_report.verdicts(gain, auto=not planned.policy.exact, synchronous=planned.synchronous is None))
    if steps:
        parts.append(plan_report.training(steps, costs))
    parts += planned.parts(rows, plan_report.labels(exact=planned.policy.exact), steps or 0,
                           table=arguments.learning_table("", measured), verbose=verbose, buckets=verbose)
    commands = plan_report.next_lines(gain, rows, planned.plan, planned.shares)
    publish(Report(result, headline, (*parts, Commands(tuple(commands)))), json)


@app.command()
def create(
    model: Model, nodes: Nodes = "", homes: Homes = "", server: Server = "", cluster: ClusterFile = "",
    batch: Batch = None, optimizer: Optimizer = "", sync: Sync = "auto", codec: Codecs = None,
    profile: Costs = "",
    max_loss: Annotated[str, typer.Option(
        help="Allowed increase of the loss after the same number of steps: 0.01, or 1%.", metavar="PART")] = "",
    loss: Annotated[str, typer.Option(help="A loss model from `commlayer tune`.", metavar="FILE")] = "",
    learning: Annotated[str, typer.Option(
        help="Convergence factors from `python -m bench.own_learning`.", metavar="FILE")] = "",
    allow: Annotated[list[str] | None, typer.Option(
        help="forward (results during the next forward pass) or staleness (one-step-stale results); may be repeated.",
        metavar="NAME")] = None,
    noise_scale: NoiseScale = None, out: Out = PLAN, json: Json = None,
) -> None:
    """Write the plan with the shortest time to a loss, and its inputs in a file next to it."""
    from commlayer import plan_file, records
    from commlayer.cli import arguments
    from commlayer.cli.plan.planned_job import planned_job, policy_for_sync
    from commlayer.planner.model import NO_LIMIT

    check_out(out)
    check_out(plan_file.inputs_path(out))
    machines, measured = arguments.cluster_named(cluster, nodes, homes, server), arguments.profile_named(profile)
    for name in allow or ():
        if name not in ALLOWED:
            raise InvalidInput("E-CLI-OPTION", f"--allow {name}: allowed are {', '.join(ALLOWED)}")
    if sync == "step" and "staleness" in (allow or ()):
        raise InvalidInput("E-CLI-OPTION", "--sync step and --allow staleness contradict each other: remove one of them")
    policy = structs.replace(
        policy_for_sync(sync, optimizer), codecs=arguments.codecs_named(codec or [], measured),
        max_loss=arguments.loss_part("--max-loss", max_loss) if max_loss else NO_LIMIT, forward="forward" in (allow or ()),
        staleness="staleness" in (allow or ()))
    planned = planned_job(model, machines, batch, optimizer, policy, measured, noise_scale, loss=loss, learning=learning)
    beside = plan_file.inputs_path(out)
    write({beside: records.encode(planned.inputs).decode() + "\n", out: plan_file.format_plan(planned.plan)})
    rows, gain = planned.alternatives()
    parts = planned.parts(rows, {}, table=arguments.learning_table(learning, measured), buckets=True)
    where = f"plan {records.digest(planned.plan)} is in {out}, its inputs are in {beside}"
    publish(Report(planned.plan, planned.headline(gain), (*parts, where)), json)


@app.command()
def explain(
    bucket: Annotated[str, typer.Argument(help="A bucket's number, or the name of one of its tensors.")],
    plan: PlanFile = PLAN,
    json: Json = None,
) -> None:
    """Explain a bucket: path, codec, cost and runner-up."""
    from commlayer import plan_file
    from commlayer.cli.plan import report as plan_report
    from commlayer.planner.explanation import explain as with_explanation
    from commlayer.planner.explanation import find_bucket
    from commlayer.planner.plan_rules import verify

    record, inputs = plan_file.plan_in(plan), plan_file.read_plan_inputs(plan)
    if problems := verify(record, inputs.job):
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}")
    result = with_explanation(record, find_bucket(record, inputs.job, bucket), inputs.job, inputs.cluster, *inputs.costs())
    publish(Report(result, "", plan_report.explanation(result)), json)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.")],
    after: Annotated[Path, typer.Argument(help="Another plan of the same model.")],
    json: Json = None,
) -> None:
    """Show the differences of two plans by tensor. Exit code 1 if they differ."""
    from commlayer import plan_file
    from commlayer.cli.plan import report as plan_report
    from commlayer.planner.explanation import diff as differ

    beside = plan_file.inputs_path(before)
    job = plan_file.read_plan_inputs(before).job if beside.is_file() else None
    result = differ(plan_file.plan_in(before), plan_file.plan_in(after), job)
    publish(Report(result, "", plan_report.difference(result, str(before), str(after))), json)
    raise typer.Exit(0 if result.equal else 1)


@app.command()
def whatif(
    plan: PlanFile = PLAN,
    add: Annotated[str, typer.Option(help='Add these machines one by one: "rtx3060@100/20Mb".', metavar="LINE")] = "",
    bandwidth: Annotated[str, typer.Option(help='Set every link to these rates: "10Mb,100Mb,1Gb".', metavar="RATES")] = "",
    count: Annotated[str, typer.Option(help='Numbers of nodes, added ones like the last: "2,4,8".', metavar="COUNTS")] = "",
    gpu: Annotated[str, typer.Option(help='Set all nodes to each of these GPUs: "rtx3060,rtx4090".', metavar="NAMES")] = "",
    json: Json = None,
) -> None:
    """Plan the same job on other machines; print the gains, and the link rate below which compression is faster."""
    from commlayer import plan_file
    from commlayer.cli.arguments import whole_numbers
    from commlayer.cli.plan import report as plan_report
    from commlayer.planner.baselines import what_if
    from commlayer.planner.data.tables import with_job_speeds
    from commlayer.planner.inputs import parse_nodes, parse_rate

    values = {"--add": add, "--bandwidth": bandwidth, "--count": count, "--gpu": gpu}
    options = [name for name, value in values.items() if value]
    if len(options) != 1:
        raise InvalidInput("E-CLI-OPTION", "give exactly one of: --add LINE, --bandwidth RATES, --count COUNTS or --gpu "
                           f"NAMES; got {' and '.join(options) or 'none'}")
    inputs = plan_file.read_plan_inputs(plan)
    last = [node for node in inputs.cluster.nodes if node.ranks][-1]
    # New nodes are like the last one: behind NAT if the last one is.
    grown = with_job_speeds([structs.replace(node, server=last.server) for node in
                             (parse_nodes(add, first=len(inputs.cluster.nodes)) if add else ())], inputs.job.timing)
    others = tuple(structs.replace(last, device=name) for name in _split_list(gpu))
    curve = what_if(
        inputs.job, inputs.cluster, *inputs.costs((*grown, *others)), add_nodes=grown,
        bandwidths=[parse_rate(text) for text in _split_list(bandwidth)],
        counts=whole_numbers("--count", count, "2,4,8") if count else [], gpus=_split_list(gpu),
    )
    publish(Report(curve, "", plan_report.curve(curve)), json)


@app.command()
def lint(
    plan: Annotated[Path, typer.Argument(help="The plan to check, with its inputs next to it.")],
    json: Json = None,
) -> None:
    """List all problems of a plan, bucket by bucket. Exit code 2 if there are any."""
    from commlayer import plan_file
    from commlayer.errors import RecordError
    from commlayer.planner.plan_lint import lint as linted

    problems, job, machines, costs = plan_file.find_problems(plan_file.read_plan_text(plan, "plan").encode()), None, None, None
    plan_ = None if problems else plan_file.plan_in(plan)
    try:
        if plan_file.inputs_path(plan).is_file():
            inputs = plan_file.read_plan_inputs(plan)
            job, machines, costs = inputs.job, inputs.cluster, inputs.costs()[0]
    except RecordError as error:
        problems.append(str(error))
    if plan_ is not None:
        problems += linted(plan_, job, machines, costs, _codec_problem)
    publish(Report(problems, "", [Commands(problems or [f"{plan}: nothing wrong"])]), json)
    raise typer.Exit(2 if problems else 0)


@app.command()
def init(
    out: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("cluster.toml"),
) -> None:
    """Write an example cluster file for you to edit."""
    from commlayer.planner.data import FOLDER

    if out.exists():
        raise InvalidInput("E-CLI-OPTION", f"{out} exists: choose another file")
    write({out: (FOLDER / "cluster.toml").read_text("utf-8")})
    typer.echo(f"wrote {out}: edit it, then run `commlayer estimate MODEL --cluster {out}`")


def _codec_problem(text: str) -> str:
    from commlayer.compressors.plan_codecs import parse

    try:
        parse(text)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
