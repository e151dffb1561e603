"""MkDocs' hooks: README.md is the site's first page, and what pages link to outside of docs/ is part of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Beside docs/, at the same places as in the repository.
LINKED = (
    "AGENTS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "beast/envs/*.csv",
    "benchmarks/LEDGER.md",
    "benchmarks/peers/*.csv",
    "benchmarks/results/*.*",
    "examples/*/*.*",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    files.append(File.generated(config, "index.md", content=(root / "README.md").read_text()))
    for path in sorted(path for pattern in LINKED for path in root.glob(pattern)):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them: docs/ is its root."""
    if page.file.src_uri == "index.md":
        return re.sub(r"\]\(docs/", "](", markdown)
    if "/" not in page.file.src_uri:
        return re.sub(r"\]\(\.\./(README\.md)?", lambda found: "](index.md" if found[1] else "](", markdown)
    return markdown
