# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation."""

from __future__ import annotations

import inspect
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

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
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery"]

# Dark on white in both styles, as pictures are.
_FRAME = "width: 100%; height: 29rem; border: 0; background: white; color-scheme: light"


def show_pages(
    block: tuple[Any, ...], block_vars: dict[str, Any], gallery_conf: dict[str, Any]
) -> str:
    """Frames of the HTML pages that a block of a gallery program has saved."""
    del gallery_conf
    program, frames = Path(block_vars["target_file"]), []
    for page in Path(block_vars["src_file"]).parent.glob("*.html"):
        if page.name in block[1]:  # not what another program has left there
            name = f"{program.stem}_{page.name}"
            shutil.move(page, program.parent / "images" / name)
            where = f'src="../_images/{name}" title="{page.stem}" style="{_FRAME}"'
            frames.append(f".. raw:: html\n\n   <iframe {where}></iframe>\n\n")
    return "".join(frames)


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",  # written anew by each build
    "abort_on_example_error": True,
    "download_all_examples": False,
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "plot_gallery": "True",
    "parallel": 2,  # programs at once: most of their time is compilation, on one core
    "run_stale_examples": True,
    "remove_config_comments": True,
    "capture_repr": (),  # shows what a program prints, not what a line returns
    "image_scrapers": ("matplotlib", show_pages),
}
suppress_warnings = ["config.cache"]  # of sphinx-gallery's own settings
# ArviZ 0.23 says on its first import of the day that 1.x is different, on a page too.
warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor")
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_title = f"numpyro_largecat {release}"
# Lines of 88 characters then fit beside both lists.
_SMALL_CODE = {"code-font-size": "81.25%"}
html_theme_options = {
    "light_css_variables": _SMALL_CODE,
    "dark_css_variables": _SMALL_CODE,
}

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_inherit_docstrings = False  # NumPyro's own are for NumPyro's documentation
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def warn_about_missing_entries(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn, which fails the build, about a public name that the API page leaves out."""
    del app
    entries = env.get_domain("py").data["objects"]
    for name in public_names(numpyro_largecat, "numpyro_largecat"):
        if name not in entries:
            logging.getLogger(__name__).warning(
                "the API page has no entry for %s", name
            )


def public_names(module: ModuleType, path: str) -> list[str]:
    """What a module gives, and what its modules give, such as ``bounds.Bouchard``."""
    names = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            names += public_names(value, f"{path}.{name}")
        elif module is numpyro_largecat or name not in numpyro_largecat.__all__:
            names.append(f"{path}.{name}")
    return names


def copy_pages(app: Sphinx, error: Exception | None) -> None:
    """Put the pages of the gallery where their frames look for them."""
    if error is None and app.builder.format == "html":
        for page in Path(app.srcdir, "auto_gallery", "images").glob("*.html"):
            shutil.copy(page, Path(app.outdir, "_images"))


def setup(app: Sphinx) -> None:
    app.connect("env-check-consistency", warn_about_missing_entries)
    app.connect("build-finished", copy_pages)
