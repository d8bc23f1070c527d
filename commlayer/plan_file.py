"""Reads and writes plan files, and the file with the planner's inputs that is stored next to each plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from commlayer import loss_budget, records
from commlayer.balance.loss_model import LossModel
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.convergence import LearningRow
from commlayer.planner.data.tables import learning_rows, profile_from_tables
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Basis, Cluster, Node, Policy, Profile
from commlayer.records import SCHEMA, Bucket, Job, Plan, Record, complete


class PlanFileInputs(Record, frozen=True):
    """The inputs from which the planner made a plan, stored next to the plan file, so that the plan can be explained and
    changed later."""

    job: Job
    cluster: Cluster
    profile: Profile | None = None
    policy: Policy | None = None
    loss: LossModel | None = None
    """Loss penalties of codecs, measured on the user's task. None: convergence factors determine the loss."""

    learning: tuple[LearningRow, ...] = ()
    """Convergence factors measured on the user's task. Empty: those of the profile, else the built-in table's."""

    def costs(self, others: Sequence[Node] = ()) -> tuple[Profile | None, Policy | None]:
        """Profile and policy for planning; None where the planner's defaults apply. `others`: machines that a sweep adds to the
        cluster."""
        policy, cluster = self.policy or Policy(), structs.replace(self.cluster, nodes=(*self.cluster.nodes, *others))
        if self.loss is None:
            if self.profile is None and not self.learning:
                return None, self.policy
            return self._learnt(self.profile or profile_from_tables(cluster)), self.policy
        profile = self.profile or loss_budget.tables(cluster, self.loss, policy.max_loss)
        return loss_budget.with_loss_penalties(self._learnt(profile), policy, self.loss)

    def _learnt(self, profile: Profile) -> Profile:
        """Adds convergence factors to the profile: the user's own, else the profile's, else the built-in table's."""
        return structs.replace(profile, learning=self.learning or profile.learning or learning_rows())


def read_plan_text(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise InvalidInput("E-PLAN-FILE", f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput("E-PLAN-FILE", f"{what} {path}: is not UTF-8 text") from None
    except ValueError as error:  # a path with a null byte
        raise InvalidInput("E-PLAN-FILE", f"{what} {str(path)!r}: {error}") from None


def inputs_path(path: Path) -> Path:
    """Path of the inputs file of a plan file: plan.inputs.json for plan.json."""
    return path.with_name(f"{path.stem}.inputs.json")


def plan_in(path: Path) -> Plan:
    data = read_plan_text(path, "plan").encode()
    for problem in find_problems(data):
        raise RecordError("E-PLAN-FILE", f"plan {path}: {problem}")
    return records.decode(data, Plan, f"plan {path}")


def find_problems(data: bytes) -> list[str]:
    """Reasons why `data` is not a plan of this version, one line for each bad bucket and one for the other fields; empty if
    `data` is a plan."""
    try:
        records.decode(data, Plan, "plan")
    except RecordError as error:
        return [*_find_problems(data)] or [str(error)]
    return []


def _find_problems(data: bytes) -> Iterator[str]:
    try:
        content = msgspec.json.decode(data)
    except records.MALFORMED as error:
        yield f"is not JSON, or is cut short: {error}"
        return
    if not isinstance(content, dict):
        yield f"expected a JSON object with job and buckets, got `{type(content).__name__}`"
        return
    if content.get("schema", SCHEMA) != SCHEMA:
        # Checked first, because fields of another schema are unknown here.
        yield f"plan has schema {content['schema']}, this version reads schema {SCHEMA}: create the plan again"
        return
    buckets = content.get("buckets")
    bucket_list = buckets if isinstance(buckets, list) else []
    for what, part, kind in (("", {**content, **({"buckets": []} if bucket_list else {})}, Plan),
                             *((f"bucket {place}: ", bucket, Bucket) for place, bucket in enumerate(bucket_list))):
        try:
            msgspec.convert(part, complete(kind))
        except msgspec.ValidationError as error:
            yield f"{what}{error}"


def format_plan(plan: Plan) -> str:
    """The text of a plan file. Each bucket has its own line, for readers and for version control."""
    buckets = ",\n".join(records.encode(bucket).decode() for bucket in plan.buckets)
    rest = records.encode(structs.replace(plan, buckets=())).decode()
    return rest.replace('"buckets":[]', f'"buckets":[\n{buckets}\n]', 1) + "\n"


def read_plan_inputs(path: Path) -> PlanFileInputs:
    beside = inputs_path(path)
    if not beside.is_file():
        raise InvalidInput("E-PLAN-FILE",
                           f"{beside}: no such file; `commlayer plan create --out {path}` writes it next to the plan")
    try:
        return records.decode(read_plan_text(beside, "inputs").encode(), PlanFileInputs, f"inputs {beside}")
    except RecordError as error:
        raise RecordError("E-PLAN-FILE", error.what) from None


def read_plan_basis(plan: Any) -> Basis | None:
    """Reads the plan and its inputs if `plan` is the path of a plan file with an inputs file; else returns None. Raises
    ValueError if one of the files is invalid, or if they belong to different models."""
    if not isinstance(plan, str | Path) or str(plan) == "auto" or not os.path.isfile(inputs_path(Path(plan))):
        return None
    stored = read_plan_inputs(Path(plan))
    basis = Basis(plan_in(Path(plan)), checked_inputs(stored.job, stored.cluster, stored.profile, stored.policy))
    if basis.plan.job != stored.job.digest():
        raise InvalidInput("E-PLAN-FILE", f"{inputs_path(Path(plan))} belongs to another model than {plan}; create "
                                          "both files again with `commlayer plan create`")
    return basis


def training_server_hosts(plan: Plan, basis: Basis | None, nodes: int) -> tuple[int, ...]:
    """The plan's server hosts, as numbers of the training nodes that start the servers. Empty if a host does not train, or if
    the plan lists no hosts."""
    trained = [i for i, node in enumerate(basis.inputs.cluster.nodes) if node.ranks] if basis else [*range(nodes)]
    if len(plan.hosts) != plan.servers or not {*plan.hosts} <= {*trained[:nodes]}:
        return ()
    return tuple(trained.index(host) for host in plan.hosts)
