"""Gathers the documentation site from the repository: documents stay where they are, and keep one place.

MkDocs calls the functions named ``on_...`` (``mkdocs.yml`` names this file). Paths in the navigation and in links are
those of the repository. Links to what is no page, such as source code, become plain text with the path. Pages below
``reference/`` are made from the declarations of commands and from docstrings.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

from nvflare_plugins.cli.main import COMMANDS  # noqa: E402
from tests.generated_tables import DOCUMENTS  # noqa: E402

PICTURES = (".svg", ".csv")
API = {
    "nvflare_plugins": ("nvflare_plugins.recipes", "nvflare_plugins.scoring", "nvflare_plugins.conformance.sums"),
    "he_processors": tuple(f"he_processors.{path.stem}" for path in sorted((ROOT / "he_processors").glob("[a-z]*.py"))),
    "dp_components": tuple(f"dp_components.{path.stem}" for path in sorted((ROOT / "dp_components").glob("[a-z]*.py"))),
}
"""What the pages of Python's interface show, by page."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"(?:[*-]|\d+\.) ")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading as code hosts make it, so that links lead there in both places."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set how anchors are made."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's documents, what they show, and generated pages in the place of the folder of documents."""
    paths = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    shown = {
        target
        for source in paths
        for *_, link in _LINK.findall((ROOT / source).read_text(encoding="utf-8"))
        if (target := resolved(source, link)).endswith(PICTURES) and (ROOT / target).is_file()
    }
    kept = [file for file in files if file.src_dir != config.docs_dir]
    kept += [
        File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in sorted(paths) + sorted(shown)
    ]
    kept.append(File.generated(config, "reference/commands.md", content=commands()))
    for package, modules in API.items():
        kept.append(File.generated(config, f"reference/{package}.md", content=interface(package, modules)))
    return Files(kept)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a document whose links lead to pages or are text, with lists as Python-Markdown reads them."""

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path = resolved(page.file.src_uri, target)
        if re.match(r"[a-z]+:|#", target) or files.get_file_from_path(path) is not None:
            return found[0]
        if files.get_file_from_path(f"{path}/README.md") is not None:
            return f"{mark}[{text}]({target.rstrip('/')}/README.md)"
        return text if path.endswith(text.strip("`").strip("./")) else f"{text} (`{path}`)"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "\n".join(indented("".join(parts).splitlines())) + "\n"


def resolved(source: str, link: str) -> str:
    """Return the path in the repository that a link of a document means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link.partition("#")[0]))


def indented(lines: list[str]) -> Iterator[str]:
    """Yield lines with four spaces for each level of a list, where documents have two or three."""
    in_list = in_fence = in_code = was_blank = False
    shift = 0
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        content = line[depth:]
        if not in_fence and content and depth == 0:
            in_list = _ITEM.match(content) is not None or (in_list and not was_blank)
        if in_list and depth and content and not in_fence:
            in_code = depth >= 6 and (was_blank or in_code)  # a block of commands within an item
            if not in_code:
                shift = 4 * round(depth / 2.5) - depth
            elif was_blank:
                shift = 8 - depth
        elif not in_fence:
            shift = 0
        yield " " * (depth + shift) + content if content and in_list else line
        if content.startswith("```"):
            in_fence = not in_fence
        was_blank = not content


def commands() -> str:
    """Return the page of all commands with their options, from their declarations."""
    lines = ["# Commands", "", "`veilboost COMMAND --help` says the same in the shell.", ""]
    for name, command in COMMANDS.items():
        context = click.Context(command, info_name=f"veilboost {name}", terminal_width=100, max_content_width=100)
        lines += [f"## veilboost {name}", "", command.get_short_help_str(200), "", "```text"]
        lines += [*command.get_help(context).splitlines(), "```", ""]
    return "\n".join(lines)


def interface(package: str, modules: tuple[str, ...]) -> str:
    """Return a page of Python's interface: docstrings of modules, which are read and not run."""
    options: dict[str, Any] = {"filters": ["!^_"]}
    body = [line for module in modules for line in (f"::: {module}", f"    options: {options}", "")]
    return "\n".join([f"# Python: {package}", "", *body])
