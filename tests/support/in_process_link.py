"""A way to a passive party of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from nvflare_plugins.kinds.vertical.messages import Answer, Request, from_bytes, to_bytes
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty


class InProcessLink:
    """A passive party in a thread of this process; every message takes its byte form on the way."""

    def __init__(self, party: PassiveParty):
        self._party = party
        self._worker = ThreadPoolExecutor(1, "passive")

    def ask(self, request: Request) -> Future[Answer | None]:
        """Hand the request's bytes to the party's thread."""
        return self._worker.submit(self._answer, to_bytes(request))

    def flush(self) -> None:
        """Requests wait for nothing."""

    def close(self) -> None:
        """End the party's thread."""
        self._worker.shutdown(cancel_futures=True)

    def _answer(self, data: bytes) -> Answer | None:
        request: Any = from_bytes(data)
        answer = self._party.answer(request)
        if answer is None:
            return None
        sent: Any = from_bytes(to_bytes(answer))
        return cast(Answer, sent)
