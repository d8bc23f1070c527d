"""Defines the components of a session: the parts that are called at each step, and when plan or members of the job change.

Components communicate with those of other ranks, so all ranks call them in the same order. The order depends only on
`ComponentOrder`, not on the time at which a component was added.

Components that only observe steps must not end training. `Components` reports the first error of each with its traceback, and
calls the component again after the next step, because other ranks may wait for its messages. An error of those that find lost
members ends the step. A CommError means that ranks are lost; then the job decides whether it ends, or continues with the
remaining members.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol, TypeVar

from commlayer.errors import CommError

C = TypeVar("C")


class ComponentOrder(IntEnum):
    """Order in which a job calls its components. Components that find lost members come first. Then local steps begin or end,
    and the loop adapts to the new sync mode. Checks of what all ranks have done follow, then components that might
    change the plan, then those that only measure. The last component sends the row of all of them."""

    JOB = 0
    SCHEDULE = 1
    LOOP = 2
    CHECKS = 3
    CONTROLLER = 4
    TRACE = 5
    STALE_PLAN = 6
    OTHER = 7
    ROWS = 8


class Pending(IntEnum):
    """What `complete` completes. Each value includes those before it."""

    STEP = 0
    """Results of the last step that arrive after its backward pass."""
    DUE = 1
    """An exchange of local steps that is due because this rank's optimizer step was skipped."""
    SENT = 2
    """A running exchange of local steps, whose outer step may have fragments left."""
    RUNNING = 3
    """A running exchange of local steps, and the remaining fragments of its outer step."""
    ALL_STEPS = 4
    """All local steps, in an early exchange during which no member can join."""
    ALL_EXCHANGES = 5
    """All local steps, in scheduled exchanges, during which members can join."""


class Component:
    """Base class of components: each method does nothing. All ranks make each call after the same step."""

    order = ComponentOrder.OTHER

    def reads_sums(self) -> bool:
        """Returns True if `sums_arrived` reads the sums of the current step."""
        return False

    def sums_arrived(self) -> None:
        """Called when sums have arrived and averages are not written yet."""

    def end_step(self) -> None:
        """Called when averages are written, before the optimizer's step. Under sync="forward" it is called after that step,
        before the next step's first gradient. The component can change the plan."""

    def end_local_step(self) -> None:
        """Called after the backward pass of a local step, before the optimizer's step."""

    def end_exchange(self, *, early: bool) -> None:
        """Called after an exchange of local steps. If it was scheduled, the component can change the plan. `early`: True if it
        was made for a checkpoint, an evaluation, the end, or a change of plans; training continues under the same plan."""

    def begin_exchange(self) -> None:
        """Called before anything of a step, or of an outer step, is sent. The component can admit a new member."""

    def patience(self) -> float:
        """Returns the seconds to wait after a step's deadline, because the coordinator has yet to decide which worker is lost.
        """
        return 0.0

    def explain(self, error: BaseException) -> BaseException:
        """Replaces an error by a more precise one, or returns it unchanged."""
        return error

    def interrupted(self, cause: str) -> None:
        """Called when the script's exception has ended the wait for a step's results. `cause`: for the other ranks."""

    def complete(self, pending: Pending) -> None:
        """Completes what is pending, for a call that all ranks make together."""

    def loaded(self) -> None:
        """Called after weights or optimizer states of all ranks were replaced."""

    def new_plan(self) -> None:
        """Called when another plan has taken effect."""

    def new_members(self) -> None:
        """Called when the members have changed."""

    def close(self) -> None:
        """Called at the normal end. Completes pending exchanges."""


class Owner(Protocol):
    """The interface of a job that its components use."""

    @property
    def generation(self) -> int: ...

    def report_failure(self, what: str, error: Exception) -> None: ...

    def drop_call(self, error: CommError, generation: int | None = None) -> None: ...


class Components:
    """The components of one job on one rank, sorted by their order. Components of equal order stay in the order in which they
    were added."""

    def __init__(self, job: Owner | None = None) -> None:
        """`job`: decides about errors. None: there are no components, as for a worker without a session."""
        self._job = job
        self._all: list[Component] = []
        self._methods: dict[str, list[tuple[Component, Callable[..., Any]]]] = {}
        """For each name of a method: the components that have one which does something, and the method."""
        self._failed: set[Component] = set()
        """Components whose first error is reported already."""

    def add(self, component: Component) -> None:
        self._set(sorted([*self._all, component], key=attrgetter("order")))

    def remove(self, component: Component) -> None:
        self._set([each for each in self._all if each is not component])
        self._failed.discard(component)

    def clear(self) -> None:
        self._set([])

    def _set(self, components: list[Component]) -> None:
        self._all, self._methods = components, {}

    def of(self, kind: type[C]) -> list[C]:
        return [each for each in self._all if isinstance(each, kind)]

    def _of_all(self, method: str) -> list[tuple[Component, Callable[..., Any]]]:
        """Returns the components that have this method. Those that are added or removed meanwhile change the next list."""
        methods = self._methods  # before `_all`, so that no other thread finds the methods of former components
        if (found := methods.get(method)) is None:
            pairs = [(each, getattr(each, method)) for each in self._all]
            found = [pair for pair in pairs if getattr(pair[1], "__func__", None) is not getattr(Component, method)]
            methods[method] = found
        return found

    def reads_sums(self) -> bool:
        return any(self._observe("reads_sums"))

    def sums_arrived(self) -> None:
        self._observe("sums_arrived")

    def end_step(self, skip: Callable[[float], None]) -> None:
        """`skip` receives the seconds of each component, which are no computing."""
        self._observe("end_step", skip)

    def end_local_step(self) -> None:
        self._observe("end_local_step")

    def end_exchange(self, skip: Callable[[float], None], *, early: bool) -> None:
        self._observe("end_exchange", skip, early=early)

    def _observe(self, method: str, skip: Callable[[float], None] | None = None, **arguments: Any) -> list[Any]:
        """Calls a method of all components that observe, or until members leave: the others start again with the remaining
        members, in the next step. The first error of each is reported with its traceback; later ones are ignored. Returns the
        results."""
        assert self._job is not None
        results = []
        for each, call in self._of_all(method):
            begin, generation = perf_counter(), self._job.generation
            try:
                results.append(call(**arguments))
            except CommError as error:
                self._job.drop_call(error, generation)
                break
            except Exception as error:
                if each.order is ComponentOrder.JOB:
                    raise
                if each not in self._failed:
                    self._failed.add(each)
                    self._job.report_failure(type(each).__name__, error)
            if skip is not None:
                skip(perf_counter() - begin)
        return results

    def begin_exchange(self) -> None:
        self._call("begin_exchange")

    def patience(self) -> float:
        return float(sum(call() for _, call in self._of_all("patience")))

    def explain(self, error: BaseException) -> BaseException:
        for _, call in self._of_all("explain"):
            error = call(error)
        return error

    def interrupted(self, cause: str) -> None:
        self._call("interrupted", cause)

    def complete(self, pending: Pending) -> None:
        self._call("complete", pending)

    def loaded(self) -> None:
        self._call("loaded")

    def new_plan(self) -> None:
        self._call("new_plan")

    def new_members(self) -> None:
        self._call("new_members")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for _, call in self._of_all(method):
            call(*arguments)
