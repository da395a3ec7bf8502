"""The site that `make docs` builds: Sphinx with furo and myst-nb. Nothing in it is loaded from a network."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

import gradshare

# Notebooks run with the settings here and not with those of whoever builds; kernels report errors alone.
PROFILE = Path(__file__).parent / "_build" / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text('c.Application.log_level = "ERROR"\n', encoding="utf-8")
os.environ["IPYTHONDIR"] = str(PROFILE.parent)

project = "gradshare"
author = "The gradshare authors"
version = release = gradshare.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = False  # types in signatures are PyTorch's, whose pages are not here
default_role = "code"

html_theme = "furo"
html_title = f"gradshare {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"  # the default underlines names as if they were links
html_extra_path = ["../results/paper/report.html"]  # a report page, to be tried
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"  # again only where the code has changed: docs/_build/.jupyter_cache
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_render_markdown_format = "myst"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False


def mathml(visitor: Any, node: nodes.math | nodes.math_block) -> None:
    """Mathematics as MathML, which browsers draw by themselves: no script, no fonts from elsewhere."""
    block = isinstance(node, nodes.math_block)
    found = latex2mathml.tex2mathml(node.astext(), as_block=block)
    visitor.body.append(f'<div class="math">{found}</div>' if block else found)
    raise nodes.SkipNode


GROUPS = {  # headings of the page of all names, and the modules that each is for
    "Algorithms": ["learners.algorithms"],
    "Train, test, load": ["runs.train", "runs.evaluate", "runs.export", "runs.config"],
    "Data": ["data.tasks", "data.dataset", "method.episodes"],
    "Networks": ["engine.networks"],
    "Sharing and its controls": ["method.sharing", "method.controls"],
    "Rules of the inner loop": ["method.inner_optimisers", "method.rules", "method.testing"],
    "Loops of your own": [
        "learners.learner",
        "learners.outer",
        "learners.graphs",
        "learners.optimisers",
        "method.state",
    ],
    "Several processes, errors, and more": [],  # what no other heading has
}


HOME = gradshare._MODULE | gradshare._MODULES  # the module of each name


def all_names(app: Sphinx, page: str, content: list[str]) -> None:
    """The page of all names, from `gradshare.__all__`: a new public name is there without a change."""
    if page != "api":
        return
    left = dict.fromkeys(gradshare.__all__)
    overview, sections = "\n| for | names |\n|---|---|\n", ""
    for title, modules in GROUPS.items():
        chosen = sorted((name for name in left if HOME[name] in modules or not modules), key=place)
        overview += f"| {title} | " + ", ".join(f"{{py:obj}}`~gradshare.{name}`" for name in chosen) + " |\n"
        sections += f"\n## {title}\n\n```{{eval-rst}}\n" + "\n".join(map(directive, chosen)) + "\n```\n"
        left = {name: None for name in left if name not in chosen}
    content[0] += overview + sections


def place(name: str) -> tuple[str, int]:
    """Where a name is defined: names are in the order of the code, which begins with the simplest."""
    value = getattr(gradshare, name)
    return HOME[name], 0 if inspect.ismodule(value) else inspect.getsourcelines(value)[1]


def directive(name: str) -> str:
    """What documents a public name."""
    value = getattr(gradshare, name)
    if inspect.ismodule(value):
        return f".. py:module:: gradshare.{name}\n.. autofunction:: gradshare.{name}.check_rule"
    if inspect.isclass(value):
        value.__name__ = name  # gs.momentum is a class with a capital; autodoc would say "alias of"
    else:
        return f".. autofunction:: gradshare.{name}"
    members = "" if issubclass(value, torch.nn.Module | Exception) else "\n   :members:"
    return f".. autoclass:: gradshare.{name}{members}"


SECTION = re.compile(r"(Args|Attributes|Example|Examples|Raises|Returns):$")


def plain_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: indented equations stay as they are, and * | _ mean themselves."""
    written: list[str] = []
    in_section = in_equation = False
    for at, line in enumerate(lines):
        indented, before = line.startswith("    "), lines[at - 1] if at else ""
        if SECTION.match(line):
            in_section = True
        elif line and not indented:
            in_section = in_equation = False
        if indented and not in_section and not before.strip() and not in_equation:
            in_equation = True
            written += ["::", ""]
        if in_section and line.startswith(" " * 12) and not before.strip() and ">>>" not in line:
            written[-1:] = ["", " " * 8 + "::", ""]  # an equation in the text of an argument
            in_equation = True
        elif in_section and line.strip() and not line.startswith(" " * 12):
            in_equation = False
        if in_equation or ">>>" in line or "... " in line:
            written.append(line)
        else:  # in backticks nothing has a meaning
            parts = re.split(r"(`+[^`]*`+)", line)
            written.append("".join(re.sub(r"([*|\\]|_\b)", r"\\\1", part) if i % 2 == 0 else part
                                   for i, part in enumerate(parts)))  # fmt: skip
    alone = what in ("attribute", "property")  # napoleon would read "words: more" in its first line as a type
    lines[:] = ["..", "", *written] if alone else written


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("source-read", all_names)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon
