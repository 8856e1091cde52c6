"""What ``veilboost verify`` answers, as a value and as a command."""

from __future__ import annotations

from nvflare_plugins.cli.main import main
from nvflare_plugins.cli.verify import find_evidence, verify_files
from tests.support.evidence_attempts import ToyAuthority


def check(folder):
    return verify_files(find_evidence([folder]), ToyAuthority())


def only_failures(folder) -> str:
    result = check(folder)
    assert not result.sound
    return "\n".join([*result.failures, *(text for attempt in result.attempts for text in attempt.failures)])


def cli(*arguments: str) -> int:
    return main(["verify", *map(str, arguments)])
