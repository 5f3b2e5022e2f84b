"""Sphinx's settings for the site. ``make docs`` builds it, see ``tools/docs.py``."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent / "tools")]

project = "monai_gds"
author = "The monai_gds authors"
project_copyright = "2026, the monai_gds authors"
version = release = version_of("monai_gds")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "benchmarks",
    "generated",
]
exclude_patterns = ["_ext", "generated/commands.md"]  # which reference/commands.md includes
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

# Notebooks are saved with their outputs, some of them from a GPU: nothing is run here.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# "--size" must stay "--size", also in the examples of commands.
smartquotes = False

html_theme = "furo"
html_title = f"monai_gds {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_directory": "docs/", "footer_icons": []}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

suppress_warnings = ["mystnb.unknown_mime_type"]  # widgets of progress bars, which have a text form too
