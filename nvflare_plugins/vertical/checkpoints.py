"""Checkpoints of vertical training: each party keeps its own part, with a tag that names the attempt and the round.

The tag is a keyed hash that only the parties of the attempt can make, the same at all of them. A resumed job goes on
from the last round whose tag all parties hold, so that parts of different attempts never meet.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from he_processors.errors import ConfigurationError
from nvflare_plugins.horizontal.run_folder import RunFolder

_FORMAT = "veilboost-vertical-checkpoint-1"


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """One party's part after ``n_rounds`` rounds: the masked model at the active party, else its private table."""

    n_rounds: int
    tag: str
    content: str

    def write(self, folder: RunFolder) -> None:
        """Keep the checkpoint; older ones go, but for the last one. Privacy: for this site's user alone."""
        document = {
            "format": _FORMAT, "n_rounds": self.n_rounds, "tag": self.tag, "digest": _digest(self.content),
            "content": self.content,
        }  # fmt: skip
        folder.write_checkpoint(self.n_rounds, json.dumps(document).encode(), mode=0o600)


def read_checkpoints(folder: RunFolder) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by number of finished rounds.

    Raises:
        ConfigurationError: one is damaged.
    """
    found = {}
    for n_rounds, path in folder.checkpoints().items():
        try:
            document = json.loads(path.read_bytes())
            checkpoint = Checkpoint(document["n_rounds"], document["tag"], document["content"])
            is_whole = document["format"] == _FORMAT and document["digest"] == _digest(checkpoint.content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            is_whole = False
        if not is_whole or checkpoint.n_rounds != n_rounds or not isinstance(checkpoint.tag, str):
            raise ConfigurationError(f"the checkpoint after {n_rounds} rounds of {folder.path.name} cannot be read")
        found[n_rounds] = checkpoint
    return found


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
