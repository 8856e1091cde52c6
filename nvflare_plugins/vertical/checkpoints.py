"""Checkpoints of vertical training: each party keeps its own part, with a tag that names the attempt and the round.

The tag is a keyed hash that only the parties of the attempt can make, the same at all of them. A resumed job goes on
from the last round whose tag all parties hold, so that parts of different attempts never meet. A round is the least
that can be kept: the trees of a round follow from the same gradients.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.run_folder import RunFolder

_FORMAT = "veilboost-vertical-checkpoint-1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """One party's part after ``n_rounds`` rounds: the masked model at the active party, else its private table."""

    n_rounds: int
    tag: str
    content: str

    def write(self, folder: RunFolder) -> None:
        """Keep the checkpoint, durably; older ones go, but for the last two. Privacy: for this site's user alone."""
        document = {
            "format": _FORMAT,
            "n_rounds": self.n_rounds,
            "tag": self.tag,
            "digest": _digest(self.content),
            "content": self.content,
        }
        folder.write_checkpoint(self.n_rounds, json.dumps(document).encode(), mode=0o600)


def read_checkpoints(folder: RunFolder) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by number of finished rounds.

    One that is damaged is left out: an earlier one may do.

    Raises:
        ConfigurationError: all that there are are damaged.
    """
    paths = folder.checkpoints()
    found = {n: one for n, path in paths.items() if (one := _read(path)) is not None and one.n_rounds == n}
    if paths and not found:
        raise ConfigurationError(f"the checkpoints of job {folder.path.name} cannot be read: start a new job")
    if len(found) < len(paths):
        _log.warning("a checkpoint of job %s cannot be read: it is left out", folder.path.name)
    return found


def _read(path: Path) -> Checkpoint | None:
    """Return what ``Checkpoint.write`` wrote; None for anything else."""
    try:
        document = json.loads(path.read_bytes())
        checkpoint = Checkpoint(document["n_rounds"], document["tag"], document["content"])
        is_whole = document["format"] == _FORMAT and document["digest"] == _digest(checkpoint.content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return checkpoint if is_whole and isinstance(checkpoint.tag, str) else None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
