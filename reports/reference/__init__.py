"""The reference of the documentation site, made from the code when the site is built: fields, commands, functions, words.

Nothing of it is kept in a file, so it cannot fall behind.
"""

from __future__ import annotations

from types import ModuleType

from reports.reference.api import api_page
from reports.reference.commands import command_page
from reports.reference.examples import examples_page
from reports.reference.jobs import field_pages
from reports.reference.names import names_page
from reports.reference.words import metrics_page, terms_page

FOLDER = "reference"


def pages(api: ModuleType) -> dict[str, str]:
    """Markdown of every page, by its path in docs/. api: the front door, whose public names are told."""
    named = {
        "commands": command_page(),
        **field_pages(),
        "python": api_page(api),
        "metrics": metrics_page(),
        "terms": terms_page(),
        "names": names_page(),
        "examples": examples_page(),
    }
    return {f"{FOLDER}/{name}.md": text for name, text in named.items()}
