"""What others have written and this site's policy names: found by package entry points, loaded by nobody else's wish.

A job names a plugin, but what is imported follows from the site's own policy alone: first the distribution that the
policy names is looked up among the installed ones, by its metadata, which runs none of its code; then its version is
compared; only then its one entry point of that name is loaded. The server loads none.

Security: a plugin runs in the site's process with everything the site has. The version is what the installed files
say of themselves; who may write to the site's Python packages may write anything there.
"""

from __future__ import annotations

from importlib import metadata

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.site.policy import SitePolicy

PROCESSORS = "veilboost.processors"
"""Entry points of this group are processors of horizontal sums (kinds/horizontal/processors.py)."""


def load_plugin(policy: SitePolicy, name: str, group: str = PROCESSORS) -> object:
    """Load the entry point of a plugin that the site's policy names.

    Raises:
        PolicyRefusal: the policy does not name it, or another version of it is installed; nothing was loaded.
        ConfigurationError: its distribution is not installed, has no such entry point, or cannot be imported.
    """
    pin = policy.plugin(name)
    site, key, given = policy.site, f"plugins.{name}", pin.distribution
    try:
        installed = metadata.distribution(given)
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"{site} has no distribution {given} for plugin {name}. Policy key: {key}. Remedy: install {pin} there."
        ) from None
    if installed.version != pin.version:
        found = printable(str(installed.version), 40)
        raise PolicyRefusal(
            f"the policy of {site} names {pin} for plugin {name}, but version {found} is installed; it was not loaded. "
            f"Policy key: {key}.version. Remedy: install {given}=={pin.version}, or have {site} review {found} and "
            "change its policy."
        )
    entries = tuple(installed.entry_points.select(group=group, name=name))
    if len(entries) != 1:
        raise ConfigurationError(
            f"distribution {pin} at {site} has {len(entries)} entry points {name!r} in the group {group}, where one is "
            f"due; nothing was loaded. Policy key: {key}.distribution. Remedy: name the distribution that has it."
        )
    try:
        return entries[0].load()
    except (Exception, SystemExit) as error:  # foreign code, of which anything may come; its text may hold anything too
        raise ConfigurationError(
            f"plugin {name} of {pin} cannot be imported at {site} ({type(error).__name__}). Policy key: {key}. Remedy: "
            "install it with all that it needs."
        ) from error
