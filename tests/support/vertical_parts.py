"""The parts of a model that was trained in one process, as the sites of a job would hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.kinds.vertical import model
from nvflare_plugins.kinds.vertical_inference.inference import PathOwner
from tests.support.in_process_link import InProcessLink
from tests.support.vertical_federation import Joined, Outcome


def parts_of(outcome: Outcome, joined: Joined | None = None) -> tuple[model.ActivePart, dict[str, model.PassivePart]]:
    """Return the active party's part, and the passive parties' by name. Args: joined: has the lists of categories."""
    parties = tuple(model.PartyColumns(party.name, party.schema.aliases) for party in outcome.parties)
    own = tuple(json.loads(outcome.result.model)["learner"]["feature_names"][: outcome.n_own])
    active = model.ActivePart(outcome.result.model, own, parties, outcome.result.best_round)
    passive = {
        party.name: model.PassivePart(
            dict(passive.table),
            tuple(f"c{i}" for i in range(len(party.schema.aliases))),
            party.schema.aliases,
            {} if joined is None else {f"c{i}": words for i, words in enumerate(joined.lists(number)) if words},
        )
        for number, (party, passive) in enumerate(zip(outcome.parties, outcome.passives, strict=True), start=1)
    }
    return active, passive


def features_of(joined: Joined, active: model.ActivePart, table: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Return each passive party's columns of a joined table."""
    return {party.site: joined.part(i + 1, table) for i, party in enumerate(active.parties)}


class Links(dict[str, InProcessLink]):
    """Ways to passive parties of this process; leave the context to end their threads."""

    def __init__(
        self, passive: dict[str, model.PassivePart], features: dict[str, NDArray[np.float32]], batch_rows: int
    ):
        super().__init__(
            {site: InProcessLink(PathOwner(part, features[site], batch_rows)) for site, part in passive.items()}
        )

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *error: object) -> None:
        for link in self.values():
            link.close()


def write_parts(
    folders: dict[str, Path], parts: dict[str, model.Part], active: str, job_id: str
) -> model.ModelIdentity:
    """Write the parts of one model into the sites' folders, as the end of a training does."""
    commitments = {site: model.commit(part) for site, part in sorted(parts.items())}
    identity = model.ModelIdentity(job_id, active, tuple(commitments), tuple(c.digest for c in commitments.values()))
    for site, part in parts.items():
        folders[site].mkdir(parents=True, exist_ok=True)
        model.write_part(folders[site], site, part, identity, commitments[site])
    return identity
