"""The additive schemes of vertical jobs: one row for each profile, and for each that a plugin brings.

Schemes over big numbers are ``AdditiveScheme`` objects of he_processors, and all that is done with them is the same:
packing, bins, re-randomisation, checks. One of others is an entry point of the group ``veilboost.vertical_schemes``,
loaded only where the site's policy names its distribution, version and the hash of its files (site/policy.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from he_processors.additive_schemes import AdditiveScheme, PublicKey, Scheme
from he_processors.errors import ConfigurationError
from he_processors.paillier import PAILLIER
from nvflare_plugins.evidence.audit import scheme_facts
from nvflare_plugins.evidence.format import Protection
from nvflare_plugins.kinds.vertical.histogram_maker import CLEAR_CODE
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.site.policy import SCHEMES, SitePolicy, load_hashed
from nvflare_plugins.wire.profiles import plugin_of

_LONGEST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class VerticalScheme:
    """How gradients and their sums are protected from the parties that compute on them.

    Attributes:
        code: in the active party's announcement.
        protection: by which the evidence names ciphertexts.
        numbers: the scheme over big numbers; of points, and of pairs in the clear, Paillier's, which is not used.
        release: of its plugin, equal at all parties; "" for ours.
        facts: what the evidence records of the plugin.
    """

    code: int
    protection: Protection
    numbers: AdditiveScheme = PAILLIER
    release: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


BUILT_IN = {
    VerticalProfile.PAILLIER.value: VerticalScheme(Scheme.PAILLIER.value, Protection.PAILLIER),
    VerticalProfile.ELGAMAL.value: VerticalScheme(Scheme.ELGAMAL.value, Protection.ELGAMAL),
    VerticalProfile.PLAIN.value: VerticalScheme(CLEAR_CODE, Protection.CLEAR),
}


def choose_scheme(policy: SitePolicy, job: VerticalJob) -> VerticalScheme:
    """Return the scheme of a job; a plugin's is loaded if the site's policy pins its files.

    Raises:
        PolicyRefusal, ConfigurationError: as ``load_hashed``; or what it loaded is no scheme of that name; or this
            site's cluster would need it.
    """
    name = plugin_of(job.profile)
    if name is None:
        return BUILT_IN[job.profile]
    if policy.cluster_for(job.data_set) is not None:
        raise ConfigurationError(
            f"{policy.site} trains data set {job.data_set!r} on a cluster, whose workers load no plugins: "
            f"{job.profile} is refused there. Policy key: cluster. Remedy: choose profile paillier."
        )
    scheme, pin = load_hashed(policy, name, SCHEMES, "which encrypt gradients")
    problem = problem_of(scheme, name)
    if problem or not isinstance(scheme, AdditiveScheme):
        raise ConfigurationError(
            f"plugin {name} of {pin} at {policy.site} is not usable: {problem}. Policy key: plugins.{name}. Remedy: "
            "another version of it (nvflare_plugins/conformance tells its author more)."
        )
    facts = scheme_facts(name, pin.distribution, pin.version, pin.sha256, scheme.assumption)
    return VerticalScheme(Scheme.PLUGIN.value, Protection.PLUGIN, scheme, f"{pin} sha256 {pin.sha256}", facts)


def problem_of(scheme: object, name: str) -> str:
    """Return why what a plugin brings is no scheme; "" if it is one."""
    if not isinstance(scheme, AdditiveScheme):
        return "its entry point is no AdditiveScheme"
    if scheme.name != name:
        return "it calls itself by another name than its entry point"
    text = scheme.assumption
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_TEXT or not text.isprintable():
        return f"its assumption is no text of 1 to {_LONGEST_TEXT} printable characters"
    if not isinstance(scheme.public_key, type) or not issubclass(scheme.public_key, PublicKey):
        return "its public_key is no kind of PublicKey"
    return "" if callable(scheme.generate) else "its generate cannot be called"
