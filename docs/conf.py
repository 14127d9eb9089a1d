# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation."""

from __future__ import annotations

import importlib

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import numpyro_largecat

project = "numpyro_largecat"
author = "The numpyro_largecat contributors"
project_copyright = author
release = version = numpyro_largecat.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"numpyro_largecat {release}"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

autodoc_inherit_docstrings = False  # NumPyro's own are for NumPyro's documentation
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

PUBLIC_MODULES = ("numpyro_largecat", "numpyro_largecat.data")


def warn_about_missing_entries(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn, which fails the build, about a public name that the API page leaves out."""
    del app
    entries = env.get_domain("py").data["objects"] | env.get_domain("py").data["modules"]
    for module in PUBLIC_MODULES:
        for name in importlib.import_module(module).__all__:
            if not name.startswith("__") and f"{module}.{name}" not in entries:
                logging.getLogger(__name__).warning(
                    "the public name %s.%s has no entry in the documentation", module, name
                )


def setup(app: Sphinx) -> None:
    app.connect("env-check-consistency", warn_about_missing_entries)
