"""What the site has beside the pages of this folder: mkdocs calls the functions whose names begin with `on_`."""

import re
from pathlib import Path, PurePosixPath

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
    "examples/results/music/README.md": "music-results.md",
    "examples/results/paper/README.md": "paper.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures they show."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for _, _, target, _ in LINK.findall(text):
            if target.endswith(".png"):
                picture = PurePosixPath(source).parent / target
                files.append(File.generated(config, str(picture), abs_src_path=str(ROOT / picture)))
        files.append(File.generated(config, page, content=rewrite_links(text, PurePosixPath(source).parent)))
    return files


def rewrite_links(text: str, folder: PurePosixPath) -> str:
    """A page of `folder` with links as the site has them; what is no page is named instead, with its path."""

    def link(match: re.Match) -> str:
        picture, shown, target, anchor = match.groups()
        path = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        if picture:
            return f"![{shown}]({path})"
        path = f"{path}/README.md" if f"{path}/README.md" in PAGES else path
        if path in PAGES or path.startswith("docs/"):
            return f"[{shown}]({PAGES.get(path, path.removeprefix('docs/'))}{anchor or ''})"
        return f"`{path}`" if shown.strip("`/") in path else f"{shown} (`{path}`)"

    return LINK.sub(link, text)


def on_page_markdown(markdown: str, **_) -> str:
    """Links to those pages as the site has them; as they are written, they lead there in the repository."""
    return re.sub(r"\]\(\.\./([^)#]+)", lambda match: f"]({PAGES.get(match[1], '../' + match[1])}", markdown)


def on_page_content(html: str, **_) -> str:
    """Types of arguments without the backticks that they have in docstrings of the kind transformers writes."""
    return re.sub(r"<code>(`[^<]*)</code>", lambda match: f"<code>{match[1].replace('`', '')}</code>", html)
