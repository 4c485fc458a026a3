"""Hooks of mkdocs: pages outside docs/ join the site, and links that work on a code host work there too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PICTURE = re.compile(r'<picture>.*?srcset="([^"]+)".*?<img src="([^"]+)"(.*?)>\s*</picture>', re.DOTALL)
LINK = re.compile(r"\[([^][]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add results/ and the pages of the root, at the same paths."""
    found = [ROOT / name for name in PAGES] + sorted(path for path in (ROOT / "results").rglob("*") if path.is_file())
    for path in found:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/, and pictures with a dark variant."""
    folder = page.file.src_uri.rpartition("/")[0]
    at = ROOT / folder if (ROOT / page.file.src_uri).exists() else ROOT / "docs" / folder

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        file, mark, anchor = target.partition("#")
        path = (at / file).resolve()
        if not file or "://" in file or not path.is_relative_to(ROOT) or not path.exists():
            return match.group()
        inside = path.relative_to(ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT).as_posix()
        if inside in files.src_uris:
            return f"[{text}]({'../' * len(Path(folder).parts)}{inside}{mark}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{inside})"
        return f"`{text.strip('`')}`"  # a source file, and no public repository to link to

    themes = r'<img src="\2#only-light"\3><img src="\1#only-dark"\3>'
    return LINK.sub(link, PICTURE.sub(themes, markdown))
