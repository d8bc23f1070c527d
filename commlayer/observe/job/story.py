"""The story of a run in sentences, from its events: what `commlayer log` prints, and what an alert says."""

from __future__ import annotations

from commlayer.errors import join_names
from commlayer.observe.events import AloneEvent, Event, JobEvent, LogEvent, MemberEvent, PlanEvent, WaitEvent
from commlayer.observe.job.answers import span
from commlayer.observe.job.job_view import JobView


class Story:
    """Follows the events of a job. `view`: the job so far."""

    def __init__(self) -> None:
        self.view = JobView()
        self._faster: bool | None = None
        """Whether the job is faster than one machine alone. None: this is not known yet."""

    def apply(self, event: Event) -> list[str]:
        """Applies an event, and returns the sentences that it adds to the story: none, one, or one more about the end of the
        run."""
        view, run, over = self.view, self.view.job.run, self.view.over
        view.apply(event)
        sentences = [self._sentence(event)] if self._counts(event) else []
        if isinstance(event, JobEvent) and event.run != run:
            sentences = [f"{event.name or 'The run'} began with {plural(event.world, 'worker')}."]
        return [*sentences, *([self._end()] if view.over and not over else [])]

    def _counts(self, event: Event) -> bool:
        """Returns whether the story mentions an event that the view has applied. Of speeds it mentions only which of the two is
        faster, because they change often."""
        match event:
            case AloneEvent():
                before, self._faster = self._faster, event.over_alone >= 1
                return before is not self._faster
            case LogEvent(level="info"):
                return False
            case MemberEvent(state="waiting") if not event.member.startswith("home"):
                return False
        return bool(self.view.recent) and self.view.recent[-1] is event

    def _sentence(self, event: Event) -> str:
        view = self.view
        match event:
            case MemberEvent():
                return self._member_sentence(event)
            case WaitEvent():
                names = join_names(event.names if event.what == "join" else [*map(view.display, event.names)],
                                   4) or "other ranks"
                if event.over:
                    return f"The wait for {names} is over."
                why = {"join": " to join", "heartbeat": ", which sends no heartbeats"}.get(event.what, "")
                return f"The job waits for {names}{why}" + (f", at most {event.limit_s:.0f} s." if event.limit_s else ".")
            case PlanEvent():
                return f"The plan is now {event.digest[:8]} ({event.reason}): {event.summary}."
            case AloneEvent():
                return f"The job reaches a loss {event.over_alone:.3g} times as fast as its fastest machine alone."
        text = view.words(event).rstrip(".")
        return f"{text}." if event.rank > 0 else f"{text[:1].upper()}{text[1:]}."  # a home's name is as it is

    def _member_sentence(self, event: MemberEvent) -> str:
        view, name = self.view, self.view.display(event.member)
        kind, _, number = event.member.partition(" ")
        worker = view.workers.get(int(number)) if kind == "worker" and number.isdecimal() else None
        if event.state == "waiting":
            return f"{name} waits for the others."
        if event.state == "joined":
            return f"{name} joined{' again' if worker is not None and worker.returns else ''}."
        if event.state == "left" and not event.reason:
            return f"{name} {'finished' if worker is not None and worker.step.steps else 'left'}."
        what = f"{name} {'was lost' if event.state == 'dead' else 'left'}{event.reason and f': {event.reason}'}".rstrip(".")
        return f"{what}. The others train on." if event.continues and view.present else f"{what}."

    def _end(self) -> str:
        view = self.view
        steps, lasted = plural(view.step, "step"), span(view.time - view.begun)
        if view.failed:
            return f"The run failed after {steps} and {lasted}: {'; '.join(view.failures[:3])}."
        loss = "" if view.loss is None else f" The last loss is {view.loss:.4g}."
        return f"The run is done: {steps} in {lasted}.{loss}"


def plural(count: int, what: str) -> str:
    """
    >>> plural(1, "step"), plural(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {what}{'s' if count != 1 else ''}"
