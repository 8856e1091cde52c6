"""``python -m nvflare_plugins.conformance.pin DISTRIBUTION``: what a policy says of an installed plugin."""

from __future__ import annotations

import json
import sys
from importlib import metadata

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.policy import hash_of


def main(arguments: list[str]) -> int:
    """Print distribution, version and the hash of its files as JSON, for the key ``plugins`` of a policy."""
    try:
        (name,) = arguments
        pin = {"distribution": name, "version": metadata.version(name), "sha256": hash_of(name)}
    except (ValueError, metadata.PackageNotFoundError, ConfigurationError) as error:
        sys.stderr.write(f"give the name of one installed distribution: {error}\n")
        return 1
    sys.stdout.write(json.dumps(pin) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
