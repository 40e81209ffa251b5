"""What one sample of a module's input is: `3x224x224`, `2048:int64`, several with commas between."""

from __future__ import annotations

import math
import re

from pydantic import Field

from topologies.reading import Config, UserError, shown

LARGEST = 10**12  # numbers of a sample
WIDTHS = {"float": 0, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}  # bytes; a float's are the plan's


class InputSpec(Config):
    """Sizes and type of one input without its batch."""

    shape: tuple[int, ...] = Field(max_length=16, description="Sizes of one sample.")
    dtype: str = Field("float", description="float (in the plan's precision), int64, int32, uint8 or bool.")


def parse_inputs(text: str) -> tuple[InputSpec, ...]:
    """Inputs as the command line has them. Raises UserError."""
    return tuple(_parse(part.strip(), text) for part in text.split(","))


def _parse(part: str, text: str) -> InputSpec:
    sizes, _, dtype = part.partition(":")
    dtype = dtype or "float"
    numbers = tuple(int(size) for size in sizes.split("x")) if re.fullmatch(r"\d{1,12}(x\d{1,12})*", sizes) else ()
    if not numbers or dtype not in WIDTHS or 0 in numbers or math.prod(numbers) > LARGEST:
        known = ", ".join(WIDTHS)
        rule = f"must be the sizes of one sample, such as 3x224x224, or 2048:int64 (types: {known})"
        raise UserError(f"--input {shown(text)}: {shown(part)} {rule}")
    return InputSpec(shape=numbers, dtype=dtype)
