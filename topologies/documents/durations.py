"""How long something takes when it does not always take as long: a distribution with a mean, read from a text.

`20 min` is always 20 min, `exponential 2 h` has this mean, `weibull 100 days shape 0.7` and `lognormal 10 min sigma 0.5` too:
the mean is the mean of the distribution, whatever its shape. Lifetimes of parts and times of repairs are given in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from topologies.documents.units import duration
from topologies.reading import Config

Duration = Annotated[float, BeforeValidator(duration)]
BUFFER = 256  # draws made at a time: one by one numpy takes twenty times as long
_PARAMETER = {"weibull": "shape", "lognormal": "sigma"}


class Spread(Config):
    """A distribution of times: its mean in seconds and, for Weibull and lognormal, `shape` (the Weibull modulus, or sigma of the
    logarithm).
    """

    mean: float = Field(ge=0)
    kind: Literal["constant", "exponential", "weibull", "lognormal"] = "constant"
    shape: float = Field(default=1.0, gt=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> Spread:
        if self.kind == "weibull" and self.shape < 0.2:
            raise ValueError(f"shape={self.shape:g}: must be at least 0.2; below, most parts fail at once and few ever do again")
        return self

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """`count` times in seconds."""
        if self.kind == "exponential":
            return generator.standard_exponential(count) * self.mean
        if self.kind == "weibull":
            return generator.weibull(self.shape, count) * (self.mean / math.gamma(1 + 1 / self.shape))
        if self.kind == "lognormal":
            drawn: NDArray[np.float64] = np.exp(generator.standard_normal(count) * self.shape - self.shape**2 / 2)
            return drawn * self.mean
        return np.full(count, self.mean)

    def sampler(self, generator: np.random.Generator) -> Callable[[], float]:
        """A function that returns the next time."""
        return (lambda: self.mean) if self.kind == "constant" else buffered(lambda: self.draw(generator, BUFFER))


def buffered(draw: Callable[[], NDArray[np.float64]]) -> Callable[[], float]:
    """The values of arrays that `draw` makes, one by one."""
    values: list[float] = []

    def following() -> float:
        if not values:
            values.extend(draw()[::-1].tolist())
        return values.pop()

    return following


def spread(given: object) -> object:
    """`lognormal 10 min sigma 0.5` as fields; a mapping or a `Spread` as it is. Raises ValueError."""
    if not isinstance(given, str):
        if isinstance(given, int | float):
            raise ValueError("needs a unit, such as '10 min'")
        return given
    words = given.split()
    kind = words[0] if words and words[0] in ("constant", "exponential", *_PARAMETER) else None
    rest = words[1:] if kind else words
    fields: dict[str, object] = {"kind": kind or "constant"}
    parameter = _PARAMETER.get(kind or "")
    if parameter:
        if len(rest) < 2 or rest[-2] != parameter:
            raise ValueError(f"must say {parameter}, such as '{kind} 10 min {parameter} 0.5'")
        fields["shape"], rest = float(rest[-1]), rest[:-2]
    return {**fields, "mean": duration(" ".join(rest))}


Times = Annotated[Spread, BeforeValidator(spread)]
