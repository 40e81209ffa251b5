"""What one sample of a module's input is: `3x224x224`, `2048:int64`, several with commas between, and with a name where it is an
argument by keyword: `input_features=80x3000,decoder_input_ids=448:int64`.
"""

from __future__ import annotations

import math
import re

from pydantic import Field

from strategies.models.parts import unsaid
from topologies.reading import Config, UserError, shown

LARGEST = 10**12  # numbers of a sample
WIDTHS = {"float": 0, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}  # bytes; a float's are the plan's


class InputSpec(Config):
    """Sizes and type of one input without its batch."""

    shape: tuple[int, ...] = Field(max_length=16, description="Sizes of one sample.")
    dtype: str = Field("float", description="float (in the plan's precision), int64, int32, uint8 or bool.")
    name: str = Field("", exclude_if=unsaid, description="Argument of the module's forward; none: by its place.")


def parse_inputs(text: str) -> tuple[InputSpec, ...]:
    """Inputs as the command line has them. Raises UserError."""
    inputs = tuple(_parse(part.strip(), text) for part in text.split(","))
    names = [each.name for each in inputs]
    if "" in names[sum(not name for name in names) :]:
        raise UserError(f"--input {shown(text)}: inputs without a name come first")
    if twice := next((name for name in names if name and names.count(name) > 1), ""):
        raise UserError(f"--input {shown(text)}: two inputs are called {twice}")
    return inputs


def _parse(part: str, text: str) -> InputSpec:
    name, named, rest = part.rpartition("=")
    sizes, _, dtype = rest.partition(":")
    dtype = dtype or "float"
    numbers = tuple(int(size) for size in sizes.split("x")) if re.fullmatch(r"\d{1,12}(x\d{1,12})*", sizes) else ()
    if not numbers or dtype not in WIDTHS or 0 in numbers or math.prod(numbers) > LARGEST or (named and not name.isidentifier()):
        known = ", ".join(WIDTHS)
        rule = f"must be the sizes of one sample, such as 3x224x224, or 2048:int64 (types: {known})"
        raise UserError(f"--input {shown(text)}: {shown(part)} {rule}")
    return InputSpec(shape=numbers, dtype=dtype, name=name)
