"""The folder in which a site keeps one run: model, checkpoints, cuts, evidence, report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import is_whole
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.base.files import make_folder, write_durably, write_private
from nvflare_plugins.xgb.cuts import Cuts

MODEL = "model.json"
POLICY = "policy.json"
ATTEMPT = "attempt.json"
_SHARDS = "shards"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)\.json")
_KEPT_CHECKPOINTS = 3  # sites may be two checkpoints apart when a job is lost
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RunFolder:
    """One run at one site. All files appear whole or not at all."""

    def __init__(self, runs: Path, job_id: str):
        if not _JOB_ID.fullmatch(job_id) or job_id in (".", ".."):
            raise ConfigurationError("a job id holds only letters, digits, '.', '_' and '-'")
        self.path = runs / job_id
        self.evidence = self.path / "evidence"

    def create(self) -> RunFolder:
        """Make the folders. Privacy: the run's is for this site's user alone, whatever the files in it allow."""
        make_folder(self.evidence)
        return self

    def enter(self, number: int, attempt: str, job: str) -> None:
        """Keep, durably, which attempt of the job this site takes part in; it answers no number again, and none below.

        So no two servers lead the job: an attempt needs all its sites, and each follows the higher number alone. Nor
        does a server lead another job under the id of one that was begun.

        Args:
            job: hash of what is the same in all attempts.

        Raises:
            JobAborted: the site has answered an attempt of this number, or of a higher one.
            ConfigurationError: an attempt before was of another job, or of one that does not wait.
        """
        path = self.path / ATTEMPT
        try:
            kept: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"number": 0, "job": job}
            answered, begun = kept["number"], kept["job"]
            if not is_whole(answered, 0):
                raise ValueError
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ConfigurationError(
                f"{ATTEMPT} kept in {self.path.name} cannot be read: submit the job anew"
            ) from None
        if number <= answered:
            raise JobAborted(
                f"a server asks for attempt {number} of this job, and this site has answered attempt {answered}: what "
                "the server keeps is older than the job, or another server leads it. Remedy: submit the job anew"
            )
        has_ended = answered == 0 and number > 1 and self.evidence.is_dir() and any(self.evidence.iterdir())
        if has_ended or begun != job:
            raise ConfigurationError(
                f"a server asks for attempt {number} of job {self.path.name}, which is another job than this site has "
                "begun under that id: submit it anew"
            )
        write_durably(path, json.dumps({"number": number, "attempt": attempt, "job": job}).encode() + b"\n")

    def write_model(self, model: bytes) -> Path:
        """Keep the final model. The checkpoints stay: other sites may have none yet."""
        return write_durably(self.path / MODEL, model)

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints; only when every site has its model on the disk, for else nothing could be resumed."""
        self.drop_checkpoints_after(-1)

    def drop_checkpoints_after(self, n_rounds: int) -> None:
        """Remove those of more rounds: training goes on from here on another way, which they are not part of."""
        for number, checkpoint in self.checkpoints().items():
            if number > n_rounds:
                checkpoint.unlink(missing_ok=True)

    def write_checkpoint(self, n_rounds: int, model: bytes, mode: int = 0o644) -> None:
        """Keep the model after ``n_rounds`` rounds, durably; older checkpoints go, but for the last two."""
        write_durably(self.path / f"checkpoint-{n_rounds}.json", model, mode)
        kept = sorted(self.checkpoints())[-_KEPT_CHECKPOINTS:]
        for number, path in self.checkpoints().items():
            if number not in kept:
                path.unlink(missing_ok=True)

    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by number of finished rounds."""
        if not self.path.is_dir():
            return {}
        matches = ((_CHECKPOINT.fullmatch(p.name), p) for p in self.path.iterdir())
        return {int(match[1]): path for match, path in matches if match}

    def write_cuts(self, cuts: Cuts) -> None:
        """Keep the agreed cuts, which a resumed run must use again."""
        write_durably(self.path / "cuts.json", json.dumps(cuts.to_lists()).encode())

    def write_shards(self, n_shards: int) -> None:
        """Keep into how many shards the rows were cut, which a resumed run must cut them into again."""
        write_durably(self.path / _SHARDS, str(n_shards).encode())

    def read_shards(self) -> int:
        """Return into how many shards the rows were cut. Raises: ConfigurationError, if the file is damaged."""
        try:
            found = int((self.path / _SHARDS).read_text())
        except FileNotFoundError:
            return 1
        except ValueError:
            raise ConfigurationError(f"the number of shards kept in {self.path.name} cannot be read") from None
        return found

    def write_policy(self, allowed: bytes) -> None:
        """Keep what the site's policy allowed in this run, under the hash that evidence holds."""
        write_private(self.path / POLICY, allowed)

    def read_cuts(self) -> Cuts | None:
        """Return the kept cuts, or None. Raises: ConfigurationError, if the file is damaged."""
        path = self.path / "cuts.json"
        if not path.is_file():
            return None
        try:
            return Cuts.from_lists(json.loads(path.read_bytes()))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ConfigurationError(f"the cut points kept in {path.parent.name} cannot be read") from None
