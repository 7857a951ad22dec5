"""What the site has beside the pages of this folder: mkdocs calls the functions whose names begin with `on_`."""

import contextlib
import importlib
import io
import os
import re
import sys
import tomllib
from pathlib import Path, PurePosixPath
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "examples/results/README.md": "results.md",
    "examples/results/reading.md": "results-reading.md",
    "examples/results/memory_length.md": "results-memory-length.md",
    "examples/results/statistics.md": "results-statistics.md",
    "examples/results/parts.md": "results-parts.md",
    "examples/results/schedules.md": "results-schedules.md",
    "examples/results/penn_scaled.md": "results-penn-scaled.md",
    "examples/results/music/README.md": "music-results.md",
    "examples/results/paper/README.md": "paper.md",
    "examples/results/agents/repeat_previous_medium/README.md": "agent-medium.md",
    "examples/results/agents/repeat_previous_hard/README.md": "agent-hard.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Files that pages link, and that the site has too.
FILES = (".png", ".csv", ".txt")
DEFAULT = re.compile(r"<code>option\((?:&#39;|&#34;).*?(?:&#39;|&#34;)(?:, ([^<]*))?\)</code>")
PICTURE = re.compile(r'(<img [^>]*src="([^"]+)"[^>]*>)')
TYPE_MARKS = re.compile(r"`|, \*optional\*.*")
# Options, commands and dates, which no line break divides.
WORD = re.compile(r"(?<=[\s>([])(--[a-zA-Z][\w-]*|txl-\w+|\d{4}-\d\d-\d\d)(?=[\s<,.;:)\]=])")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures and rows that they link."""
    others = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    linked = set()
    for source in (*PAGES, *others):
        text, folder = (ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent
        linked |= {(folder / target).resolve() for _, _, target, _ in LINK.findall(text) if target.endswith(FILES)}
        if source in PAGES:
            content = rewrite_links(text, PurePosixPath(source).parent)
            files.append(File.generated(config, PAGES[source], content=content))
    for path in linked:
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def rewrite_links(text: str, folder: PurePosixPath) -> str:
    """A page of `folder` with links as the site has them; what is no page is named instead, with its path."""

    def link(match: re.Match) -> str:
        picture, shown, target, anchor = match.groups()
        path = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        if picture or path.endswith(FILES):
            return f"{picture}[{shown}]({path.removeprefix('docs/')})"
        path = f"{path}/README.md" if f"{path}/README.md" in PAGES else path
        if path in PAGES or path.startswith("docs/"):
            return f"[{shown}]({PAGES.get(path, path.removeprefix('docs/'))}{anchor or ''})"
        return f"`{path}`" if shown.strip("`/") in path else f"{shown} (`{path}`)"

    return LINK.sub(link, text)


def on_page_markdown(markdown: str, **_) -> str:
    """The same for the pages of docs/, on which links lead to files of the repository; help where a page has it."""
    text = rewrite_links(markdown, PurePosixPath("docs"))
    return text.replace("<!-- help -->", help_of_commands()) if "<!-- help -->" in text else text


def help_of_commands() -> str:
    """A section for each command, with its `--help`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    sections = []
    for name, start in scripts.items():
        module, _, function = start.partition(":")
        with (
            mock.patch.dict(os.environ, COLUMNS="100"),
            mock.patch.object(sys, "argv", [name, "--help"]),
            contextlib.redirect_stdout(io.StringIO()) as shown,
            contextlib.suppress(SystemExit),
        ):
            getattr(importlib.import_module(module), function)()
        sections.append(f"## {name}\n\n```text\n{shown.getvalue()}```\n")
    return "\n".join(sections)


def on_page_content(html: str, **_) -> str:
    """Types of arguments without the marks that they have in docstrings of the kind transformers writes, defaults
    without the help beside them, pictures that open in their own size, and `WORD` in one piece.
    """
    html = DEFAULT.sub(lambda match: f"<code>{match[1] or 'None'}</code>", html)
    html = re.sub(r"<code>(`[^<]*)</code>", lambda match: f"<code>{TYPE_MARKS.sub('', match[1])}</code>", html)
    html = PICTURE.sub(r'<a href="\2">\1</a>', html)
    return WORD.sub(r'<span class="word">\1</span>', html)
