"""Training without interruption, as arithmetic: how far it is after so many seconds, and which checkpoints are complete.

Steps all take as long, and saves and evaluations come after every so many of them: nothing has to be played one by one, however
many steps there are between two failures.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.runs.spec import Saving


@dataclass(frozen=True, slots=True)
class Pause:
    """What stops training after every `steps` steps, for `seconds`."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Position:
    """After `step` steps; seconds: in the step that is under way; paused: seconds of each pause so far, in order of `pauses`."""

    step: int
    seconds: float
    paused: tuple[float, ...]


def blocked(saving: Saving, step: float) -> float:
    """Seconds for which training waits at each save: the blocking part, and what is left of the flush before it."""
    return saving.blocking + max(0.0, saving.flush - saving.steps * step - saving.blocking)


class Segment:
    """Training from step `first` on, with steps of `step` seconds, stopped by `pauses`, in this order where they meet."""

    __slots__ = ("first", "mean", "pauses", "step", "together")

    def __init__(self, first: int, step: float, pauses: tuple[Pause, ...]) -> None:
        self.first, self.step, self.pauses = first, step, pauses
        self.together = sum(pause.seconds for pause in pauses)
        self.mean = step + sum(pause.seconds / pause.steps for pause in pauses)

    def at_step(self, first: int) -> Segment:
        """The same from another step on."""
        other = Segment.__new__(Segment)
        other.first, other.step, other.pauses, other.together, other.mean = (
            first,
            self.step,
            self.pauses,
            self.together,
            self.mean,
        )
        return other

    def computed(self, step: int) -> float:
        """Seconds until the step's own work ends, before the pauses that follow it."""
        time = (step - self.first) * self.step
        if step > self.first:
            for pause in self.pauses:
                time += pause.seconds * ((step - 1) // pause.steps - self.first // pause.steps)
        return time

    def paused(self, step: int) -> tuple[float, ...]:
        """Seconds of each pause until those after a step are over."""
        return tuple(pause.seconds * (step // pause.steps - self.first // pause.steps) for pause in self.pauses)

    def left(self, step: int) -> float:
        """Seconds until the pauses after a step are over too."""
        return (step - self.first) * self.step + sum(self.paused(step))

    def saved(self, step: int, number: int) -> float:
        """Seconds until pause `number` after a step is over."""
        time = self.computed(step)
        for pause in self.pauses[: number + 1]:
            if step % pause.steps == 0:
                time += pause.seconds
        return time

    def last_before(self, seconds: float) -> int:
        """The last step whose own work has ended after so many seconds."""
        low = max(self.first, self.first + int((seconds - self.together) / self.mean) - 1)
        high = self.first + int((seconds + self.together) / self.mean) + 2
        while high - low > 1:  # `low` has ended, `high` has not
            middle = (low + high) // 2
            if self.computed(middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def at(self, seconds: float) -> Position:
        """Where training is after so many seconds."""
        step = self.last_before(seconds)
        rest, paused = seconds - self.computed(step), []
        for pause in self.pauses:
            count = max(0, (step - 1) // pause.steps - self.first // pause.steps)
            here = min(pause.seconds, rest) if step > self.first and step % pause.steps == 0 else 0.0
            rest -= here
            paused.append(count * pause.seconds + here)
        return Position(step, rest, tuple(paused))

    def complete(self, seconds: float, position: Position, number: int, flush: float) -> int | None:
        """The step of the newest complete save of pause `number`, flushed within `flush` seconds; None: of this segment none."""
        every = self.pauses[number].steps
        step = position.step // every * every
        while step > self.first and self.saved(step, number) + flush > seconds:
            step -= every
        return step if step > self.first else None
