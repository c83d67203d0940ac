"""What makes a site of these pages, which are also read where the repository is: see mkdocs.yml.

The README is the first page. Links to files of the repository that are no pages become their names, after a look that
they are there.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_log = logging.getLogger("mkdocs.plugins.site_hooks")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of the site into names."""
    is_readme = page.file.src_uri == "index.md"

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith("#") or files.get_file_from_path(target.partition("#")[0]):
            return match.group()
        place = (ROOT if is_readme else ROOT / "docs") / target
        if not place.resolve().is_relative_to(ROOT.resolve()) or not place.exists():
            _log.warning("%s links to %s, which is not there", page.file.src_uri, target)
            return match.group()
        name = str(place.resolve().relative_to(ROOT.resolve()))
        return f"`{name}`" if text.strip("`") in (name, place.name) else f"{text} (`{name}`)"

    return _LINK.sub(shown, markdown)
