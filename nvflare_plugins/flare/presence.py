"""Which processes of a job's sites wait for a task: how a lost site is noticed quickly, and that it is back.

A site's process says every few seconds, over the job's own connections, that it is READY for a task, or in which
attempt it takes part, with a random name that it keeps while it lives. The server learns from it that a site is there
for the next attempt, and, if the name is another one than that in the attempt, that the process before has died.

A site whose whole machine was gone comes back as a new client, with a new token, which FLARE's process for the job has
never heard of: it would refuse it every task. FLARE's main process on the server has checked its own signature over
that token and the site's name before it passes the message on, so that the new token is taken over from there.

Its signature alone: FLARE's tokens do not expire, and it binds those of a client that has gone to no cell. An earlier
token of a site, from a log or a process that has been left behind, would pass. So a token is taken over only where
nothing is heard under the one before, and what comes under another one is ignored until then. Who holds an earlier
token of a site that is really gone can so keep that site from coming back, and gets the tasks that FLARE has for it,
which are the job alone: without the site's certificate there is no session. A job that must not be disturbed so is
submitted anew under ``on_lost_site="stop"``, in which no token is taken over.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.flare.timeouts import READY_FRESH_S, READY_INTERVAL_S
from nvflare_plugins.flare.transport import CHANNEL, Cell
from nvflare_plugins.flare.work import Beats

TOPIC_PAUSE = "pause"  # server to site: for whom the job waits, and until when
TOPIC_READY = "ready"  # site to server: which process this is, and the attempt in which it takes part, if in any
_NAME_BYTES = 16
_MAX_LINE_BYTES = 2000
_READY = re.compile(rb"([0-9a-f]{32})(?: ([0-9a-f]{32}))?")

logger = logging.getLogger(__name__)


class Ready:
    """A site's end: says which process this is, and whether it waits for a task.

    Args:
        server: name of the cell of the job's process at the server.
    """

    def __init__(
        self,
        cell: Cell,
        server: str,
        interval_s: float = READY_INTERVAL_S,
        randomness: RandomSource = OS_RANDOMNESS,
    ) -> None:
        self._cell, self._server, self._interval_s = cell, server, interval_s
        self._name = randomness.bytes(_NAME_BYTES).hex().encode()
        self._attempt = b""
        self._is_over: Callable[[], bool] | None = None
        self._beats: Beats | None = None
        cell.register_request_cb(CHANNEL, TOPIC_PAUSE, self._on_pause)

    def waits(self, is_over: Callable[[], bool] | None = None) -> None:
        """Say from now on, or once something is over, that this process waits for a task; until then what it said last.

        Raises:
            JobAborted: the system refuses a thread.
        """
        if is_over is None:
            self._begin(b"")
        self._is_over = is_over

    def takes_part(self, attempt: str) -> None:
        """Say from now on that this process takes part in an attempt. Raises: JobAborted, as ``waits``."""
        self._begin(b" " + attempt.encode())

    def end(self) -> None:
        """Say no more."""
        if self._beats is not None:
            self._beats.stop()
        self._beats = None

    def _begin(self, attempt: bytes) -> None:
        self._attempt, self._is_over = attempt, None
        if self._beats is None:
            self._beats = Beats(self._say, self._interval_s)
        else:
            self._beats.send_now()

    def _on_pause(self, message: Message) -> None:
        if message.get_header(MessageHeaderKey.ORIGIN) != self._server or not isinstance(
            message.payload, (bytes, bytearray, memoryview)
        ):
            logger.warning("ignored a message that is not of this job's server")
            return
        text = bytes(message.payload[:_MAX_LINE_BYTES]).decode("utf-8", "replace")
        logger.warning("%s", printable(text, _MAX_LINE_BYTES))

    def _say(self) -> None:
        is_over = self._is_over
        if is_over is not None and is_over():
            self.waits()
        try:
            message = Message({}, self._name + self._attempt)
            self._cell.fire_and_forget(CHANNEL, TOPIC_READY, self._server, message, optional=True)
        except RuntimeError as error:
            raise JobAborted("this site's connection to the FLARE server has been closed") from error


class Presence:
    """The server's end: knows of each site which process it last heard of, and when.

    Args:
        site_cells: site -> name of its job cell.
        tokens: site -> the token under which FLARE knows it so far; none where there are no tokens.
        on_token: called with (site, token) where another one is to be taken over.
        clock: seconds.

    Threads: any thread may call any method.
    """

    def __init__(
        self,
        cell: Cell,
        site_cells: Mapping[str, str],
        tokens: Mapping[str, str],
        on_token: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._site_of_cell = {name: site for site, name in site_cells.items()}
        self._on_token, self._clock = on_token, clock
        self._cell, self._lock = cell, threading.Lock()
        self._tokens = dict(tokens)
        self._heard_at = dict.fromkeys(site_cells, clock())  # when a site was last heard of under its token
        self._attempt = b""
        self._ready_at: dict[str, float] = {}  # when a site last said that it waits
        self._name: dict[str, bytes] = {}  # of the process that was last heard of
        self._taking_part: dict[str, bytes] = {}  # of the process in the present attempt
        cell.register_request_cb(CHANNEL, TOPIC_READY, self._on_ready)

    def absent(self) -> list[str]:
        """Return the sites of which no process waits for a task now."""
        with self._lock:
            now, never = self._clock(), float("-inf")
            sites = self._site_of_cell.values()
            return sorted(site for site in sites if now - self._ready_at.get(site, never) > READY_FRESH_S)

    def heard(self) -> list[str]:
        """Return the sites of which a process said anything just now."""
        with self._lock:
            now = self._clock()
            return [site for site in self._name if now - self._heard_at[site] <= READY_FRESH_S]

    def is_ready(self, site: str) -> bool:
        """Return whether a process of a site waits for a task now."""
        return site not in self.absent()

    def tell(self, text: str) -> None:
        """Have every site of the job say a line in its log; one that is gone does not hear it."""
        for name in self._site_of_cell:
            with suppress(RuntimeError):  # the cell is closed
                message = Message({}, text.encode()[:_MAX_LINE_BYTES])
                self._cell.fire_and_forget(CHANNEL, TOPIC_PAUSE, name, message, optional=True)

    def begin(self, attempt: str) -> None:
        """An attempt begins: the processes that are ready are those that take part. What was heard is used up."""
        with self._lock:
            self._taking_part = {site: self._name[site] for site in self._ready_at}
            self._attempt, self._ready_at = attempt.encode(), {}

    def replaced(self) -> list[str]:
        """Return the sites whose process of this attempt has died, as another one has come in its place."""
        with self._lock:
            return sorted(site for site, name in self._taking_part.items() if self._name[site] != name)

    def _on_ready(self, message: Message) -> None:
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        site, payload = self._site_of_cell.get(origin), message.payload
        if site is None or message.get_header(CellMessageAuthHeaderKey.CLIENT_NAME) != site:
            logger.warning("ignored a message that is not of a site of this job")
            return
        said = _READY.fullmatch(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else None
        if said is None:
            logger.warning("ignored a message of %s that says nothing", site)
            return
        token = message.get_header(CellMessageAuthHeaderKey.TOKEN)
        if isinstance(token, str) and token and not self._is_present(site, token):
            logger.warning("ignored a message in the name of %s under another token than its present one", site)
            return
        name, attempt = bytes(said[1]), said[2]
        with self._lock:
            self._name[site] = name
            if attempt is None:
                self._ready_at[site] = self._clock()
                return
            self._ready_at.pop(site, None)
            if attempt == self._attempt:
                self._taking_part.setdefault(site, name)

    def _is_present(self, site: str, token: str) -> bool:
        """Return whether a token is the one under which a site is there; one is taken over when the last is silent."""
        with self._lock:
            now, is_new = self._clock(), self._tokens.get(site) != token
            if is_new and site in self._tokens and now - self._heard_at[site] <= READY_FRESH_S:
                return False
            self._tokens[site], self._heard_at[site] = token, now
        if is_new:
            self._on_token(site, token)
        return True
