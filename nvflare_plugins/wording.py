"""Sizes and foreign text as people read them."""

from __future__ import annotations


def human_bytes(n: int) -> str:
    """Return a size as people read it: 1.5 MB for 1,500,000 bytes."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def printable(text: str) -> str:
    """Return foreign text with everything replaced that could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
