"""What a browser makes of a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Shape(HTMLParser):
    """The elements of a page with the names of their attributes, all values of these, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        self.text += data
