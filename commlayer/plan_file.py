"""Reads and writes plan files and the inputs file stored next to each."""

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
from commlayer.planner import model
from commlayer.planner.convergence import LearningRow
from commlayer.planner.inputs import remedy
from commlayer.planner.model import Basis, Node, Policy, Profile
from commlayer.planner.tables import learning_rows, profile_from_tables
from commlayer.records import SCHEMA, Bucket, Plan


class PlanFileInputs(model.PlanInputs, frozen=True):
    """The inputs that a plan was made from, stored next to the plan."""

    loss: LossModel | None = None
    """Loss penalties of codecs, measured on the user's task. None: learning rows decide."""

    learning: tuple[LearningRow, ...] = ()
    """Convergence factors measured on the user's task. Empty: the profile's, else the shipped table's."""

    def costs(self, others: Sequence[Node] = ()) -> tuple[Profile | None, Policy | None]:
        """Profile and policy to plan with. `others`: machines that a sweep adds to the cluster."""
        policy, cluster = self.policy or Policy(), structs.replace(self.cluster, nodes=(*self.cluster.nodes, *others))
        if self.loss is None:
            if self.profile is None and not self.learning:
                return None, self.policy
            return self._learnt(self.profile or profile_from_tables(cluster)), self.policy
        profile = self.profile or loss_budget.tables(cluster, self.loss, policy.max_loss)
        return loss_budget.priced(self._learnt(profile), policy, self.loss)

    def _learnt(self, profile: Profile) -> Profile:
        """Convergence factors: the user's own rows first, then the profile's, then the shipped table's."""
        return structs.replace(profile, learning=self.learning or profile.learning or learning_rows())


def text_of(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise InvalidInput("E-PLAN-FILE", f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput("E-PLAN-FILE", f"{what} {path}: is no text") from None


def sidecar(path: Path) -> Path:
    """Path of the inputs file: plan.inputs.json for plan.json."""
    return path.with_name(f"{path.stem}.inputs.json")


def plan_in(path: Path) -> Plan:
    data = text_of(path, "plan").encode()
    for problem in misread(data):
        raise RecordError("E-PLAN-FILE", f"plan {path}: {problem}")
    return records.decode(data, Plan, f"plan {path}")


def misread(data: bytes) -> list[str]:
    """Reasons why bytes are no plan of this schema, a line each: one per bad bucket, and one for the rest."""
    try:
        records.decode(data, Plan, "plan")
    except RecordError as error:
        return [*_misread(data)] or [str(error)]
    return []


def _misread(data: bytes) -> Iterator[str]:
    try:
        content = msgspec.json.decode(data)
    except records.MALFORMED as error:
        yield f"no JSON, or cut short: {error}"
        return
    if not isinstance(content, dict):
        yield f"Expected `object` with job and buckets, got `{type(content).__name__}`"
        return
    if content.get("schema", SCHEMA) != SCHEMA:
        # First: fields of another schema are unknown here.
        yield f"plan has schema {content['schema']}, this commlayer reads {SCHEMA}: make the plan again"
        return
    buckets = content.get("buckets")
    bucket_list = buckets if isinstance(buckets, list) else []
    for what, part, kind in (("", {**content, **({"buckets": []} if bucket_list else {})}, Plan),
                             *((f"bucket {place}: ", bucket, Bucket) for place, bucket in enumerate(bucket_list))):
        try:
            msgspec.convert(part, kind)
        except msgspec.ValidationError as error:
            yield f"{what}{error}"


def written(plan: Plan) -> str:
    """The plan file's text. Each bucket has its own line, for readers and for version control."""
    buckets = ",\n".join(records.encode(bucket).decode() for bucket in plan.buckets)
    rest = records.encode(structs.replace(plan, buckets=())).decode()
    return rest.replace('"buckets":[]', f'"buckets":[\n{buckets}\n]', 1) + "\n"


def inputs_of(path: Path) -> PlanFileInputs:
    beside = sidecar(path)
    if not beside.is_file():
        raise InvalidInput("E-PLAN-FILE",
                           f"{beside}: no such file; `commlayer plan make --out {path}` writes it beside the plan")
    try:
        return records.decode(text_of(beside, "inputs").encode(), PlanFileInputs, f"inputs {beside}")
    except RecordError as error:
        raise RecordError("E-PLAN-FILE", f"{error.what}{remedy(error)}") from None


def basis_of(plan: Any) -> Basis | None:
    """Reads the plan and inputs if `attach` was given a plan file with an inputs file; else None. ValueError if they are
    invalid."""
    if not isinstance(plan, str | Path) or str(plan) == "auto" or not os.path.isfile(sidecar(Path(plan))):
        return None
    basis = Basis(plan_in(Path(plan)), inputs_of(Path(plan)))
    if basis.plan.job != basis.inputs.job.digest():
        raise InvalidInput("E-PLAN-FILE", f"{sidecar(Path(plan))} is of another model than {plan}")
    return basis


def server_nodes_of(plan: Plan, basis: Basis | None, nodes: int) -> tuple[int, ...]:
    """The plan's server hosts as numbers of training nodes, where servers can be started. Empty if a host does not train."""
    trained = [i for i, node in enumerate(basis.inputs.cluster.nodes) if node.ranks] if basis else [*range(nodes)]
    if len(plan.hosts) != plan.servers or not {*plan.hosts} <= {*trained[:nodes]}:
        return ()
    return tuple(trained.index(host) for host in plan.hosts)
