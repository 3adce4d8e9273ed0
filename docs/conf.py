"""How Sphinx builds the pages here: `./dev docs`. Warnings are errors, and so is a link within the
pages that leads nowhere, or anything that a browser would ask another machine for."""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bindings")]
os.environ["PYTHONPATH"] = str(HERE.parent / "bindings")  # of the commands whose --help is shown
os.environ["COLUMNS"] = "96"

import built  # noqa: E402
import strata  # noqa: E402

project = "strata"
release = strata.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.programoutput",
]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!strata\.).*")]  # the pages of other projects are not asked
default_role = "literal"  # `names` in docstrings
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
autodoc_typehints = "none"  # signatures say less in more words
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
html_theme = "furo"
html_title = "strata"
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    """Called by Sphinx ahead of everything."""
    app.connect("build-finished", _check)


def _check(app: Any, error: Exception | None) -> None:
    """Called by Sphinx behind everything."""
    if error is None and (breaches := list(built.breaches(Path(app.outdir)))):
        raise SystemExit("\n".join(breaches))
