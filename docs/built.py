"""Checks of built pages: that links among them lead somewhere, anchors included, and that a browser
needs no other machine to show them.

    for breach in built.breaches(Path("build/docs")):
        print(breach)
"""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself, by tag: the attribute that says from where.
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        if tag == "a" and given.get("href"):
            self.links.add(given["href"] or "")
        if given.get(LOADED.get(tag, "")):
            self.loads.add(given[LOADED[tag]] or "")


def breaches(folder: Path) -> Iterator[str]:
    """What is wrong with the pages in a folder."""
    pages = {path: _Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(folder)
        for target in sorted(page.loads | page.links):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads and parts.scheme != "data":
                    yield f"{name}: loads {target} from elsewhere"
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not found.exists():
                yield f"{name}: {target} leads nowhere"
            elif parts.fragment and found in pages and parts.fragment not in pages[found].anchors:
                yield f"{name}: {target}: no such place on that page"
    for path in sorted(folder.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        if "url(http" in text or "@import" in text:
            yield f"{path.relative_to(folder)}: loads something from elsewhere"
