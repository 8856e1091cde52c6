"""The end of a job that leaves a model in several hands: every party commits to its part before any is written."""

from __future__ import annotations

from pathlib import Path

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.vertical.model.model_files import COMMITMENT_BYTES, ModelIdentity, Part, commit, write_part


def conclude_part(attempt: SiteAttempt, active: str, part: Part, n_rounds: int) -> tuple[bytes, Path]:
    """Commit to this party's part together with the others, show that all mean the same model, write the part.

    Args:
        n_rounds: of the job, on which all parties must agree too.

    Returns:
        The HMAC of what all have equal; where the part lies.

    Raises:
        ProtocolError: a party's commitment is none, or the parties ended with different models.
    """
    context, commitment = attempt.context, commit(part)
    digests = attempt.gather_sealed("parts of the model", commitment.digest)
    if any(len(digest) != COMMITMENT_BYTES for digest in digests):
        raise ProtocolError("a party's commitment to its part of the model is not one")
    identity = ModelIdentity(context.job_id, active, context.sites, tuple(digests))
    hmac = attempt.conclude(f"{identity.model_id} {n_rounds}".encode())
    return hmac, write_part(attempt.folder.path, context.site, part, identity, commitment)
