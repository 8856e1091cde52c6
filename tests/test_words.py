"""How documents are written: sentences of at most 30 words, in the field's terms instead of words of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generated_tables import by_hand
from tests.test_documents import DOCUMENTS, named
from tests.test_size import GENERATED

MOST_WORDS = 30
DIALECT = {
    r"anew": "again: one word for one thing",
    r"as ever": "nothing: it says that a fact is known, and not which",
    r"befall(?:s|en)?": "happen to",
    r"desks?": "the object on a worker",
    r"doors?": "entry point",
    r"draw(?:s|n)? out": "pad: the term for time and length that shall not tell a value",
    r"invented (?:rows|data|tables)|made-up \w+": "synthetic: the term for data that are nobody's",
    r"lanes?": "configuration: what a benchmark runs",
    r"mend(?:s|ed|ing)?": "fix, correct",
    r"pool(?:s|ed|ing)? with": "collude: the term for parties that join what they know",
    r"rooms?": "folder, package",
    r"puts? back": "restore",
    r"thrice|whence|whither|hitherto": "plain English",
}
"""Words of our own, and what to write instead. A word is here because a stranger would look for it in vain."""

STILL = {"CHANGELOG.md": (0, 3)}
"""Documents that are not yet held: at most so many long sentences, and so many words of our own. Numbers only fall."""

_NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_STARTS = re.compile(r"\s*(?:[*-]|\d+\.)\s+")
_END = re.compile(r"""[.!?:]["')\]*]*(?=\s|$)""")


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, without code, tables, headings and targets of links."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", _NOT_PROSE.sub("", text)))
    found: list[str] = []
    in_list = False
    for line in [*text.splitlines(), ""]:
        starts, blank = _STARTS.match(line), not line.strip()
        is_code = line.startswith("    ") and not in_list and not found
        if (blank or starts or is_code or line.startswith(("|", "#"))) and found:
            yield " ".join(found)
            found = []
        if starts:
            in_list, line = True, line[starts.end() :]
        elif not blank and not line.startswith(" "):
            in_list = in_list and bool(found)
        if not blank and not is_code and not line.startswith(("|", "#")):
            found.append(line.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a document: they end with a full stop, a mark or a colon, or with their paragraph."""
    for paragraph in paragraphs(text):
        yield from filter(None, (sentence.strip() for sentence in _END.split(paragraph)))


def long_ones(text: str) -> list[str]:
    """Return the sentences of more than ``MOST_WORDS`` words."""
    return [one for one in sentences(text) if len(re.findall(r"[^\W_][^\s]*", one)) > MOST_WORDS]


def words_of_our_own(text: str) -> list[str]:
    """Return each use of a word of the list, with what to write instead; tables count too, code does not."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", _NOT_PROSE.sub("", text))
    return [
        f"{match}: {instead}"
        for pattern, instead in DIALECT.items()
        for match in re.findall(rf"(?i)\b(?:{pattern})\b", text)
    ]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if named(path) not in GENERATED], ids=named)
def test_a_document_has_short_sentences_in_the_fields_terms(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    most_long, most_words = STILL.get(named(path), (0, 0))
    found = long_ones(by_hand(text))
    assert len(found) <= most_long, "\n".join(found)
    dialect = words_of_our_own(by_hand(text))
    assert len(dialect) <= most_words, "\n".join(dialect)


def test_long_sentences_and_our_words_are_found() -> None:
    long = " ".join(["word"] * 31)
    assert long_ones(f"{long}.\n") == [long]
    assert long_ones(f"* one\n  {long}\n* two\n") == [f"one {long}"]
    assert not long_ones(f"{' '.join(['word'] * 30)}. {' '.join(['word'] * 30)}: more\n")
    assert not long_ones(f"# {long}\n\n| {long} |\n\n    {long}\n\n```\n{long}\n```\n\n`{long}`\n")
    assert len(words_of_our_own("A fix is drawn anew, and mended.\n| a cell, as ever |\n`anew`\n")) == 3
