"""What all parties of a vertical job must have equal before anything private is sent, compared under the group key.

The server relays sealed documents and learns sizes only. Other parties learn row counts, keyed proofs of the order of
rows, and from which rounds a lost job can be resumed.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.session import ARITHMETIC, Session, compare_documents, compare_versions, lower_arithmetic

_MAX_DOCUMENT = 1 << 24


@dataclass(frozen=True, slots=True)
class VerticalTerms:
    """One party's terms.

    Attributes:
        versions: of XGBoost, VeilBoost and others.
        job: the job as JSON values.
        parameters: what XGBoost makes of the parameters.
        n_rows: rows of each data set.
        rows: for each data set a proof of its ids in order (``RowsProof``), in hex; empty without ids.
        model: id of the model that training continues; empty for none.
        checkpoints: tag of each checkpoint of the job to resume, by number of finished rounds.
    """

    versions: Mapping[str, str]
    job: Mapping[str, Any]
    parameters: Mapping[str, Any]
    n_rows: Sequence[int]
    rows: Sequence[str]
    model: str
    checkpoints: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return a canonical encoding."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> VerticalTerms:
        """Parse a peer's terms. Raises: ProtocolError."""
        try:
            terms = cls(**json.loads(data)) if len(data) <= _MAX_DOCUMENT else None
        except (ValueError, TypeError, RecursionError):
            terms = None
        if terms is None or not terms._is_well_formed():
            raise ProtocolError("a party's terms are not of the expected form")
        return terms

    def _is_well_formed(self) -> bool:
        mappings = (self.versions, self.job, self.parameters, self.checkpoints)
        if not all(isinstance(part, dict) for part in mappings) or not isinstance(self.model, str):
            return False
        if not isinstance(self.n_rows, list) or not isinstance(self.rows, list):
            return False
        is_text = all(isinstance(proof, str) and proof.isascii() for proof in self.rows)
        return is_text and all(type(n) is int for n in self.n_rows)

    def compare(self, theirs: VerticalTerms, site: str, due: Sequence[str]) -> None:
        """Refuse a party that does not mean the same job, model and rows.

        Args:
            due: the proofs that the party sends if it holds this site's rows in this site's order.

        Raises:
            ConfigurationError: the first difference, named.
        """
        compare_versions(self.versions, theirs.versions, site)
        compare_documents("the job", self.job, theirs.job, site)
        compare_documents("the parameters", self.parameters, theirs.parameters, site)
        if self.model != theirs.model:
            raise ConfigurationError(f"{site} holds a part of another model than this site")
        if list(self.n_rows) != list(theirs.n_rows):
            raise ConfigurationError(f"{site} has another number of rows than this site: align the rows first")
        _compare_rows(due, theirs.rows, site)


def _compare_rows(due: Sequence[str], theirs: Sequence[str], site: str) -> None:
    if len(due) != len(theirs):
        raise ConfigurationError(f"{site} has another number of data sets than this site")
    for mine, other in zip(due, theirs, strict=True):
        if bool(mine) != bool(other):
            raise ConfigurationError(
                "some parties name an id column for a data set and others do not, so that the order of rows "
                "cannot be compared: all, or none. Policy key: data_sets.<name>.id."
            )
        if not hmac.compare_digest(mine.encode(), other.encode()):
            raise ConfigurationError(
                f"{site} has other rows than this site, or the same in another order: align the rows first"
            )


@dataclass(frozen=True, slots=True)
class RowsProof:
    """Proofs that a party holds rows in an order, which no other party can copy: each names the party that gives it.

    Attributes:
        contents: for each data set what the proof covers; empty without ids.
    """

    session: Session
    contents: Sequence[bytes]

    def of(self, rank: int) -> list[str]:
        """Return the proofs that the party of this rank gives if it holds these rows, in hex; empty without ids."""
        return [
            self.session.hmac(f"order of rows of data set {number}, {rank}", content).hex() if content else ""
            for number, content in enumerate(self.contents)
        ]


def agree(
    mine: VerticalTerms, received: Sequence[bytes], sites: Sequence[str], rank: int, proof: RowsProof
) -> tuple[int, str]:
    """Compare the terms of all parties.

    Args:
        received: encoded terms by rank, this site's own included.
        proof: of this site's rows; ``mine.rows`` is this site's own.

    Returns:
        The number of finished rounds of the latest checkpoint that all parties hold of the same attempt, 0 without; and
        the lowest arithmetic that any party named, "" where none grows trees.

    Raises:
        ConfigurationError: a difference, named.
    """
    own = VerticalTerms.from_bytes(mine.to_bytes())  # as the peers see it: JSON knows no tuples
    common, arithmetic = dict(own.checkpoints), own.versions.get(ARITHMETIC, "")
    for other, data in enumerate(received):
        if other == rank:
            continue
        theirs = VerticalTerms.from_bytes(data)
        own.compare(theirs, sites[other], proof.of(other))
        common = {n: tag for n, tag in common.items() if theirs.checkpoints.get(n) == tag}
        arithmetic = lower_arithmetic(arithmetic, theirs.versions.get(ARITHMETIC, ""))
    return max((int(n) for n in common if n.isdigit()), default=0), arithmetic


def rows_content(ids: Sequence[bytes] | None) -> bytes:
    """Return what the proof of the rows' order covers; empty without ids."""
    return b"" if ids is None else b"".join(len(one).to_bytes(4, "little") + one for one in ids)
