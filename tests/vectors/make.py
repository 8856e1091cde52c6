"""Write the vectors: `python -m tests.vectors.make`.

What is random comes from SHAKE-256 of a name, so that all is the same each time; a test writes them again and compares.
Each vector is a format, what is given, and either what a reader gets from it (``gives``) or how it refuses
(``refuses``): "malformed", "forged" or "damaged". What the product says is written down here; the reader beside this
file has to say the same from the protocol's text alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dp_components.errors import LedgerDamaged
from he_processors.errors import AuthenticationError, ProtocolError
from tests.vectors import (
    cases_ciphertexts,
    cases_files,
    cases_frames,
    cases_parties,
    cases_serving,
    cases_sessions,
    cases_sums,
    product,
    product_parties,
)
from tests.vectors.form import FOLDER, Given, Vector, document

FORMATS = {**product.FORMATS, **product_parties.FORMATS}
REFUSALS = ((AuthenticationError, "forged"), (ProtocolError, "malformed"), (LedgerDamaged, "damaged"))
Case = tuple[str, str, Given]
FILES: dict[str, tuple[str, Callable[[], Iterable[Case]]]] = {
    "frames": ("Frames, lists and labels", cases_frames.cases),
    "sessions": ("Hellos, proofs, terms, keys, sealed messages and MACs", cases_sessions.cases),
    "sums": ("Masks, residues, tags, and what the server adds", cases_sums.cases),
    "ciphertexts": ("Ciphertexts and public keys of all schemes", cases_ciphertexts.cases),
    "parties": ("Messages between single parties", cases_parties.cases),
    "serving": ("Questions and answers in a job that stays", cases_serving.cases),
    "files": ("Evidence and ledgers", cases_files.cases),
}


def judged(format_: str, given: Given) -> Vector:
    """Return what the product makes of something given."""
    try:
        return {"gives": FORMATS[format_](given)}
    except tuple(kind for kind, _ in REFUSALS) as error:
        return {"refuses": next(word for kind, word in REFUSALS if isinstance(error, kind))}


def vectors(cases: Iterable[Case]) -> Iterator[Vector]:
    """Yield the vectors of cases."""
    for name, format_, given in cases:
        yield {"name": name, "format": format_, "given": given, **judged(format_, given)}


def written() -> dict[str, str]:
    """Return the content of each file by its name."""
    return {f"{name}.json": document(about, vectors(cases())) for name, (about, cases) in FILES.items()}


def main(folder: Path = FOLDER) -> None:
    """Write all files."""
    for name, content in written().items():
        (folder / name).write_text(content, encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
