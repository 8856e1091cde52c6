"""``python -m nvflare_plugins`` is the command ``veilboost``, where its script is not on the path."""

from __future__ import annotations

import sys

from nvflare_plugins.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
