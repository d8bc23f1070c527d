"""A plan file and what lies beside it. Knows files and records, no torch; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from commlayer import budget, records
from commlayer.balance.tuner_loss import LossModel
from commlayer.planner import model
from commlayer.planner.model import Basis, Node, Policy, Profile
from commlayer.records import Plan


class Inputs(model.Inputs, frozen=True):
    """What a plan was made from, as it lies beside the plan."""

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


def basis_of(plan: Any) -> Basis | None:
    """For what `attach` was given: a file's plan and what lies beside it, if something does. ValueError if it is wrong."""
    if not isinstance(plan, str | Path) or str(plan) == "auto" or not sidecar(Path(plan)).is_file():
        return None
    basis = Basis(plan_in(Path(plan)), inputs_of(Path(plan)))
    if basis.plan.job != basis.inputs.job.digest():
        raise ValueError(f"{sidecar(Path(plan))} is of another model than {plan}")
    return basis


def homes_of(plan: Plan, basis: Basis | None, nodes: int) -> tuple[int, ...]:
    """The plan's hosts as numbers of nodes that train, which is where servers can be started; none if one trains nowhere."""
    trained = [i for i, node in enumerate(basis.inputs.cluster.nodes) if node.ranks] if basis else [*range(nodes)]
    if len(plan.hosts) != plan.servers or not {*plan.hosts} <= {*trained[:nodes]}:
        return ()
    return tuple(trained.index(host) for host in plan.hosts)
