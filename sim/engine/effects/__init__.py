"""Effects: what makes a GPU, a host or a link differ from its price for a while.

An effect is a class in one file of this folder, registered under the word that users write: `gpu 37: speed 0.9 from 2 s to 5 s`
names the target, the effect with its value, and further fields of the class. Devices, hosts and the network ask effects what
they do (`Effect.kernels`, `Effect.noise`, `Effect.pauses`, `Effect.links`, …); an effect that says nothing to a question does
nothing there. Effects only take: none makes a GPU or a link quicker than its price, but for what is drawn at random. Times count
from the start of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator
from simpy import Environment, Event

from sim.engine.host import Pause
from topologies.documents.units import seconds
from topologies.gpu_targets import gpus_named
from topologies.links.impaired import LinkChange
from topologies.links.topology import Ids, Topology
from topologies.reading import Config, UserError, build, nearest, shown
from topologies.registry import Registry

Steps = Iterator[tuple[float, float]]  # (time, value from then on), in order of time; may go on for ever
Time = Annotated[float, BeforeValidator(seconds)]
LONGEST = 500  # letters of an effect
MOST = 1000  # effects of a job
SHORTEST = 1e-4  # seconds between what happens again and again: more often it is an average


class Effect(Config):
    """Base of all effects. A subclass has a field of its registered name: the value that follows the word."""

    component: ClassVar[str] = ""  # its row in the breakdown, where it lengthens kernels

    target: str  # what it acts on: gpu 37, node 3 nic 2, all
    text: str = ""  # as it was written

    def __str__(self) -> str:
        return self.text

    def gpus(self, topology: Topology) -> Ids:
        """The GPUs that it acts on, sorted. Raises UserError when there are none of that number."""
        return gpus_named(self.target, topology, f"effect '{self.target}'")

    def kernels(self) -> Steps:
        """The factor by which kernels take longer from each moment on; infinite: they stand still."""
        return iter(())

    def clocks(self) -> Steps:
        """The part of their clock at which its GPUs run from each moment on."""
        return iter(())

    def noise(self, gpu: int) -> Callable[[], float] | None:
        """The next block's factor by which its kernels take longer, drawn for one GPU."""
        return None

    def pauses(self) -> Iterator[Pause]:
        """When the thread that launches kernels loses its core, in order; may go on for ever."""
        return iter(())

    def links(self, topology: Topology) -> tuple[LinkChange, ...]:
        """Links that are not as they should be. Raises UserError when there are none of that name."""
        return ()

    def capacity(self) -> Steps:
        """The part of the capacity of `varying` links that is there from each moment on."""
        return iter(())

    def varying(self, topology: Topology) -> tuple[int, ...]:
        """Links whose capacity changes while a step runs. Raises UserError when there are none of that name."""
        return ()

    def gone(self, topology: Topology) -> frozenset[int]:
        """Links of NICs that are lost."""
        return frozenset()

    def detours(self, topology: Topology, gone: frozenset[int]) -> dict[int, int]:
        """GPUs that reach other nodes through another GPU of theirs only. gone: links of all lost NICs."""
        return {}

    @property
    def shared(self) -> int:
        """Cores that the processes of its GPUs share; 0: each has its own."""
        return 0

    @property
    def failure(self) -> float | None:
        """When its GPUs stand still for ever."""
        return None

    @property
    def constant(self) -> bool:
        """Whether it does the same at all times of a step."""
        varying = any(
            time > 0 for steps in (self.kernels(), self.clocks(), self.capacity()) for time, _ in itertools.islice(steps, 2)
        )
        return not (varying or any(True for _ in self.pauses()) or self.noise(0) or self.failure is not None)

    @property
    def alike(self) -> bool:
        """Whether all GPUs that it acts on behave alike."""
        return True


class LastingEffect(Effect):
    """Base of effects that are there from one moment to another."""

    start: Time = Field(0.0, alias="from")  # when it begins
    end: Time | None = Field(None, alias="to")  # absent: never

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"to={self.end:g} s: must be later than from={self.start:g} s")
        return self

    def during(self, value: float) -> Steps:
        """A value from `start` to `end`, and 1 after that."""
        yield self.start, value
        if self.end is not None:
            yield self.end, 1.0


effects: Registry[type[Effect]] = Registry("effect", package="sim.engine.effects")


def read_effects(given: object, where: str) -> tuple[Effect, ...]:
    """Effects as texts or mappings, one or a list. Raises UserError."""
    every = given if isinstance(given, Sequence) and not isinstance(given, str) else [] if given is None else [given]
    if len(every) > MOST:
        raise UserError(f"{where}: {len(every)} effects: must be at most {MOST}")
    return tuple(effect if isinstance(effect, Effect) else _effect(effect, where) for effect in every)


def _effect(given: object, where: str) -> Effect:
    data = _fields(given, where) if isinstance(given, str) else given
    if not isinstance(data, Mapping):
        raise UserError(f"{where}={shown(given)}: must be a text such as 'gpu 37: speed 0.9'")
    names = [str(name) for name in data if name in effects]
    if len(names) != 1:
        known = ", ".join(effects)
        raise UserError(f"{where}={shown(given)}: must name one effect of {known}, such as 'gpu 37: speed 0.9'")
    text = given if isinstance(given, str) else _text(data, names[0])
    return build(effects[names[0]], {**data, "text": text}, f"{where}={shown(given)}")


def _text(data: Mapping[str, Any], name: str) -> str:
    """A mapping as the text that says the same."""
    rest = [f"{field} {value}" for field, value in data.items() if field not in ("target", name)]
    return f"{data.get('target')}: {' '.join([f'{name} {data[name]}', *rest])}"


def _fields(text: str, where: str) -> dict[str, Any]:
    """`gpu 37: speed 0.9 from 2 s` as fields: a word that is an effect or a field of it begins a value."""
    target, colon, rest = text.partition(":")
    words = rest.split()
    if len(text) > LONGEST or not colon or not target.strip() or not words:
        raise UserError(f"{where}={shown(text)}: must be 'TARGET: EFFECT VALUE …', such as 'gpu 37: speed 0.9'")
    if words[0] not in effects:
        raise UserError(f"{where}={shown(text)}: unknown effect '{words[0]}'{nearest(words[0], effects)}")
    known = {field.alias or name for name, field in effects[words[0]].model_fields.items()} - {"target", "text"}
    result: dict[str, Any] = {"target": " ".join(target.split())}
    for word in words:
        if word in known and word not in result:
            result[word] = last = []
        else:
            last.append(word)
    return {name: value if name == "target" else _value(value) for name, value in result.items()}


def _value(words: list[str]) -> object:
    """A number, a text, or nothing."""
    text = " ".join(words)
    try:
        return float(text)
    except ValueError:
        return text


def follow(env: Environment, steps: Steps, apply: Callable[[float], None]) -> None:
    """Apply each value at its time; those of time 0 at once."""
    step = next(steps, None)
    while step is not None and step[0] <= env.now:
        apply(step[1])
        step = next(steps, None)
    if step is None:
        return
    time, value = step

    def due(_: Event) -> None:
        apply(value)
        follow(env, steps, apply)

    env.timeout(time - env.now).callbacks.append(due)


def check_period(seconds: float | None, every: float | None) -> None:
    """Raise ValueError when what lasts so long cannot happen so often."""
    if every is not None and (every < SHORTEST or every <= (seconds or 0.0)):
        raise ValueError(f"every={every:g} s: must be longer than what happens, and at least {SHORTEST:g} s")


def periodic(value: float, usual: float, start: float, seconds: float, every: float | None) -> Steps:
    """A value for `seconds` from `start` on, again after each `every` seconds (None: once)."""
    for number in itertools.count() if every is not None else range(1):
        begin = start + number * (every or 0.0)
        yield begin, value
        yield begin + seconds, usual
