"""Whether FLARE lives in this container: exit code 0, or 1 and a reason. A server listens; a site is connected to it.

Only the standard library, as it runs every half minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_KIT = Path("/kit/startup")
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _LISTENING = "01", "0A"


def connections(tables: tuple[Path, ...] = _TABLES) -> list[tuple[int, int, str]]:
    """Return (local port, remote port, state) of each TCP socket, after the kernel's own tables."""
    found = []
    for table in tables:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.is_file() else ():
            local, remote, state = line.split()[1:4]
            found.append((int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16), state))
    return found


def problem(startup: Path, sockets: list[tuple[int, int, str]]) -> str | None:
    """Return what is wrong, if anything.

    Args:
        startup: the kit's folder of that name, which says where the server is.
        sockets: as ``connections``.
    """
    is_site = (startup / "fed_client.json").is_file()
    path = startup / ("fed_client.json" if is_site else "fed_server.json")
    try:
        service = json.loads(path.read_text(encoding="utf-8"))["servers"][0]["service"]
        port = int(str(service["target"]).rpartition(":")[2])
    except (OSError, ValueError, LookupError, TypeError):
        return "the startup kit at /kit does not say where the server is"
    if is_site:
        connected = any(remote == port and state == _ESTABLISHED for _, remote, state in sockets)
        return None if connected else f"no connection to the server's port {port}"
    return None if any(local == port and state == _LISTENING for local, _, state in sockets) else f"port {port} is shut"


def main() -> int:
    """Look, and say what is wrong."""
    found = problem(_KIT, connections())
    if found is not None:
        sys.stderr.write(f"{found}\n")
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
