"""A user's mistake in one line, and the known name that is nearest to a wrong one. Nothing that `--help` imports takes long."""

from __future__ import annotations

from collections.abc import Iterable

from topologies.documents import limits

LONGEST = 2_000  # letters of an error
FEW = 8  # names that are offered in place of one


def on_one_line(text: str, most: int = LONGEST) -> str:
    """A text for people: what steers a terminal or ends a line is spelt out, and of a long text the middle is left out."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return text if len(text) <= most else f"{text[: most - most // 3]} … {text[-(most // 3) :]}"


def shown(value: object, most: int = 80) -> str:
    """A value as Python spells it, for an error."""
    try:
        return on_one_line(repr(value), most)
    except ValueError:  # Python spells no number of more than 4,300 digits
        return "a number of thousands of digits"


def kind_of(value: object) -> str:
    """What a value of a document is, as its format calls it, not Python."""
    kinds: tuple[tuple[type, str], ...] = ((dict, "a mapping"), (list, "a list"), (str, "a text"), (bool, "true or false"))
    number = "a number" if isinstance(value, int | float) else type(value).__name__
    return "nothing" if value is None else next((name for kind, name in kinds if isinstance(value, kind)), number)


class UserError(ValueError):
    """A mistake in what the user gave; the message is one complete line."""

    def __init__(self, message: str) -> None:
        super().__init__(on_one_line(message))


class CompleteError(ValueError):
    """Raised by a check whose message already names field, value and rule."""


def folded(name: str) -> str:
    """A name without what people write in several ways: capitals, hyphens, underscores, spaces."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")


def part_of(word: str, name: str) -> bool:
    """Whether a word begins a name, or a part of it behind a hyphen, and ends where a part, a letter or a number does: h100 is in
    dgx-h100 and h100-sxm, gaudi in gaudi2, a10 not in a100.
    """
    word, name = word.strip().lower().replace(" ", "-").replace("_", "-"), name.lower()
    if len(word) < 2:
        return False
    starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == "-")]
    rests = [name[at + len(word) :] for at in starts if name.startswith(word, at)]
    return any(not rest or not (rest[0].isalnum() and rest[0].isdigit() == word[-1].isdigit()) for rest in rests)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint for a misspelt name: `; did you mean 'x'?`, or the known names when none is near. cutoff: how near, 1 is the same.

    Case does not count. A name that is part of others (h200 of h200-sxm) means these, before any that only looks like it.
    """
    import difflib

    names, short = {each.casefold(): each for each in sorted(known)}, name[: 2 * limits.KEY].casefold()
    whole = [each for each in names.values() if part_of(short, each)] if short not in names else []
    if 0 < len(whole) <= FEW:
        quoted = [f"'{each}'" for each in whole]
        return f"; did you mean {' or '.join([', '.join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)}?"
    close = difflib.get_close_matches(short, names, n=1, cutoff=cutoff)
    return f"; did you mean '{names[close[0]]}'?" if close else f"; known: {', '.join(names.values())}"
