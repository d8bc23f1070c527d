"""What `commlayer plan` reads and writes: plans, jobs, clusters and profiles by name or file. Knows no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from commlayer import budget, records
from commlayer.balance import tuner_loss
from commlayer.balance.tuner_loss import LossModel
from commlayer.planner import jobs
from commlayer.planner.model import Cluster, Node, Policy, Profile
from commlayer.planner.written import cluster_from_line, cluster_of, profile_of
from commlayer.records import Job, Plan, Record


class Inputs(Record, frozen=True):
    """What a plan was made from: it lies beside the plan, so that the plan can be explained and varied later."""

    job: Job
    cluster: Cluster
    profile: Profile | None = None
    policy: Policy | None = None
    loss: LossModel | None = None
    """What codecs cost in quality, as measured; else the tables' guesses count."""

    def costs(self, others: Sequence[Node] = ()) -> tuple[Profile | None, Policy | None]:
        """Profile and policy to plan with. `others`: machines that a sweep adds to the cluster."""
        if self.loss is None:
            return self.profile, self.policy
        policy, cluster = self.policy or Policy(), structs.replace(self.cluster, nodes=(*self.cluster.nodes, *others))
        return budget.priced(self.profile or budget.tables(cluster, self.loss, policy.max_loss), policy, self.loss)


def text_of(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path}: is no text") from None


def job_named(model: str, batch: int | None) -> Job:
    """A built-in job, or one in a JSON file."""
    if model.endswith(".json"):
        return records.decode(text_of(model, "job").encode(), Job, f"job {model}")
    try:
        return jobs.builtin(model, batch)
    except ValueError as error:
        raise ValueError(f"{error}; or a job file ending in .json") from None


def cluster_named(file: str, nodes: str) -> Cluster:
    if bool(file) == bool(nodes):
        raise ValueError("say the machines once: --cluster FILE or --nodes LINE (`commlayer plan init` writes a first file)")
    if nodes:
        return cluster_from_line(nodes)
    return cluster_of(text_of(file, "cluster"), f"cluster {file}", toml=not file.endswith(".json"))


def profile_named(file: str) -> Profile | None:
    if not file:
        return None
    return profile_of(text_of(file, "profile"), f"profile {file}", toml=file.endswith(".toml"))


def loss_named(file: str) -> LossModel | None:
    return tuner_loss.read(Path(file)) if file else None


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def sidecar(path: Path) -> Path:
    """Beside plan.json, what it was made from: plan.inputs.json."""
    return path.with_name(f"{path.stem}.inputs.json")


def plan_in(path: Path) -> Plan:
    return records.decode(text_of(path, "plan").encode(), Plan, f"plan {path}")


def inputs_of(path: Path) -> Inputs:
    """What the plan in that file was made from."""
    beside = sidecar(path)
    if not beside.is_file():
        raise ValueError(f"{beside}: no such file; `commlayer plan make --out {path}` writes it beside the plan")
    return records.decode(text_of(beside, "inputs").encode(), Inputs, f"inputs {beside}")
