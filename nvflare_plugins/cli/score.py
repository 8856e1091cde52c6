"""``veilboost score``: ask a job that stays for scores of rows, at the party that has the label."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.cli.options import Options, own_policy
from nvflare_plugins.kinds.vertical_inference.score_socket import SOCKET, reachable

_WAIT_S = 330.0  # longer than the job lets a caller wait, also for a refreshed alignment


def run(options: Options) -> int:
    """Send one request, or every line of standard input; print one line of JSON for each."""
    requests = _requests(options)
    path = _socket_of(options)
    code = 0
    with _connected(path) as connection, connection.makefile("rb") as answers:
        for request in requests:
            try:
                connection.sendall(request + b"\n")
                answer = answers.readline()
            except OSError:
                answer = b""
            is_error = _says_error(answer)
            sys.stdout.buffer.write(answer)  # UTF-8 whatever the terminal's encoding is: names of classes, ids
            sys.stdout.buffer.flush()
            code = 1 if is_error else code
    return code


_WHY = (
    "it has ended, or waits for a party that is gone; this site's log says which. Remedy: try again later, or submit "
    "it anew"
)


def _says_error(answer: bytes) -> bool:
    """Return whether an answer is an error. Raises: ConfigurationError: it is no whole answer."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer) if answer.endswith(b"\n") else None
        if isinstance(told, dict):
            return "error" in told
    raise ConfigurationError(f"the job no longer answers: {_WHY}")


def _requests(options: Options) -> Iterator[bytes]:
    given = [
        document
        for is_given, document in (
            (bool(options.rows), {"ids" if options.ids else "rows": options.rows}),
            (options.status, {"status": True}),
            (options.stop, {"stop": True}),
            (options.refresh is not None, {"refresh": options.refresh}),
        )
        if is_given
    ]
    if len(given) > 1:
        raise ConfigurationError("give rows, or one of --status, --refresh and --stop")
    if not given:
        return (line.rstrip(b"\n") for line in sys.stdin.buffer if line.strip())
    (document,) = given
    if "rows" in document:
        document = {"rows": [_position(text) for text in options.rows]}
    return iter([json.dumps(document).encode()])


def _position(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigurationError("rows are positions in the alignment, from 0; with --ids they are ids")
    return int(text)


def _socket_of(options: Options) -> Path:
    if options.socket is not None:
        return Path(options.socket)
    if options.workspace is None or options.site is None:
        raise ConfigurationError("give --workspace and --site, or --socket")
    policy = own_policy(options)
    return RunFolder(policy.runs, options.job).path / SOCKET


def _connected(path: Path) -> socket.socket:
    connection: Any = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reachable(path) as name:
            connection.settimeout(_WAIT_S)
            connection.connect(name)
    except PermissionError:
        connection.close()
        raise ConfigurationError(
            f"{path.name} is for the user that runs FLARE here: run this command as that user"
        ) from None
    except OSError:
        connection.close()
        raise ConfigurationError(
            f"no job takes requests at {path}: it is not at this party (the one with the label), has not begun to "
            f"serve, or {_WHY}"
        ) from None
    result: socket.socket = connection
    return result
