"""Pages of docs/ whose programs take the libraries of this environment."""

from pathlib import Path

import pages
import pytest


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.representative] * (page.name == "quantised.md"))
        for page in pages.all_pages()
        if pages.needs_loops(page)
    ],
    ids=pages.name_of,
)
def test_programs_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    output = pages.run(page, tmp_path)
    assert pages.unprinted(page, output) == [], output
