"""The FLARE components of a job, and where a configuration names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory

from nvflare_plugins.flare.loading import end_if_left, load_or_stand_in

# Where FLARE's processes look for settings: in the site's own folders, and never in a job's.
#
# FLARE walks the whole workspace for a name and takes the first that it finds, in the formats of JSON, HOCON and YAML;
# of these HOCON reads the environment, files and addresses. A file that a job, or another party's log, has left there
# would stand before the site's own. Here it looks into named folders, and reads JSON alone.


class JobGuard(FLComponent):
    """Made in a job's process, as the site's resources say, before FLARE looks for settings and components there."""

    def __init__(self) -> None:
        super().__init__()
        end_if_left()
        close_search()
        load_or_stand_in()


def close_search() -> None:
    """Have this process look for settings in named folders only, and read them as JSON only."""
    ConfigFactory.search_config_format = staticmethod(search)
    for other in [each for each in ConfigFactory._fmt2Loader if each is not ConfigFormat.JSON]:
        del ConfigFactory._fmt2Loader[other]


def search(
    init_file_path: str, search_dirs: Sequence[str] | None = None, target_fmt: ConfigFormat | None = None
) -> tuple[ConfigFormat | None, str | None]:
    """Return the format and path of a file of settings, as ``ConfigFactory.search_config_format``.

    A bare name without folders to look in is not found: FLARE would walk the working directory.
    """
    name = Path(init_file_path)
    if target_fmt not in (None, ConfigFormat.JSON) or not (search_dirs or len(name.parts) > 1):
        return None, None
    stem = name.name.partition(".")[0]
    for start in search_dirs or [str(name.parent)]:
        for ending in (".json", ".json.default"):
            for folder in _places(Path(start)):
                if (folder / f"{stem}{ending}").is_file():
                    return ConfigFormat.JSON, str(folder / f"{stem}{ending}")
    return None, None


def _places(start: Path) -> Iterator[Path]:
    """Yield a folder itself and, if it is a workspace, those of the site in it."""
    yield start
    own = (start / "startup", start / "local")
    if all(folder.is_dir() for folder in own):
        yield from own


def ignore_settings_here() -> None:
    """Have FLARE's sessions of this process read no ``comm_config.json``: they would walk the working directory."""
    CommConfigurator._configuration, CommConfigurator._config_loaded = None, True
