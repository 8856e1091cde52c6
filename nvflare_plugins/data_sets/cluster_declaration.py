"""What a site's policy declares of a Dask cluster of its own, on which its part of a training may run."""

from __future__ import annotations

import re
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator

from he_processors.errors import ConfigurationError
from nvflare_plugins.declared import AS_GIVEN, STRICT, Document, FilePath, Flag, Name, Words, document

MOST_WORKERS = 1024
_DAY_S = 86_400
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"  # another number would make a name of it, to be looked up
_LOOPBACK = re.compile(rf"tcp://(127(\.{_OCTET}){{3}}|localhost|\[::1\]):[0-9]{{1,5}}")
_TLS = re.compile(r"tls://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def is_on_loopback(address: str) -> bool:
    """Tell whether an address of Dask's, without TLS, is one of this machine's loopback."""
    return _LOOPBACK.fullmatch(address) is not None


def is_under_tls(address: str) -> bool:
    """Tell whether an address of Dask's is one under TLS."""
    return _TLS.fullmatch(address) is not None


def _protected(value: str) -> str:
    if not is_under_tls(value) and not is_on_loopback(value):
        raise ValueError
    return value


_Deadline = Annotated[float, STRICT, Ge(1), Le(_DAY_S), AS_GIVEN, Words(f"a number of seconds from 1 to {_DAY_S:,}")]
_ADDRESS = Words("tls://host:port; tcp:// is taken on the loopback of this machine alone (127.0.0.1, localhost, [::1])")


@document
class ClusterSecurity(Document):
    """The certificates of the cluster, as Dask knows them: scheduler, workers and this site show one each."""

    WHAT = "security"
    IS_JSON = False  # it holds paths

    ca: FilePath
    """The certificates that may have signed those of scheduler and workers, in PEM."""
    cert: FilePath
    """This site's certificate towards them, in PEM."""
    key: FilePath
    """Its key, in PEM, which nobody but its owner may read (mode 0600)."""


@document
class Cluster(Document):
    """A Dask cluster of this site, for it alone: whoever may use its scheduler may read what its workers hold."""

    WHAT = "cluster"
    IS_JSON = False  # it holds paths

    scheduler: Annotated[str, STRICT, AfterValidator(_protected), _ADDRESS]
    """Address of the scheduler, `tls://host:port`. Without TLS scheduler and workers have to be on this machine's
    loopback, and run by the user who runs this site.
    """
    workers: Annotated[int, STRICT, Ge(1), Le(MOST_WORKERS)]
    """How many workers take part, each with a part of the rows. They need one thread each, and the same releases as
    this site.
    """
    security: ClusterSecurity | None = None
    """The certificates. `tls://` needs them."""
    deadline_s: _Deadline = 600.0
    """How long one step may take at a worker before the job is ended."""
    workers_read: Flag = False
    """Workers of horizontal jobs, their tunings and private jobs read their rows themselves, where a data set is read
    in passes (`memory`); they have to reach the same files at the same path. Else the site's process hands rows out,
    which it then holds.
    """
    sites: tuple[Name, ...] = ()
    """Whose it is, where several sites read one policy, as in the simulator; the others train in their own process.
    Left out, it is the site's that reads this.
    """

    def __post_init__(self) -> None:
        if self.scheduler.startswith("tls://") and self.security is None:
            raise ConfigurationError(
                "cluster.security is missing: tls:// needs the paths of ca, cert and key, as {'ca': ..., 'cert': ..., "
                "'key': ...}"
            )
        if self.scheduler.startswith("tcp://") and self.security is not None:
            raise ConfigurationError("cluster.scheduler is tcp://, which uses no certificates: write tls://")
