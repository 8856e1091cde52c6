"""``veilboost compare``: what joining is worth to a site, on its own rows, as a page that stays there."""

from __future__ import annotations

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.options import Options
from nvflare_plugins.pages.local_page import FILE_NAME, build_page
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.scoring.comparison import compare_run
from nvflare_plugins.site.policy import SitePolicy, own_workspace
from nvflare_plugins.site.policy_values import POLICY_FILE


def run(options: Options) -> int:
    """Train on the site's own rows, compare, write the page into the run's folder."""
    policy = _policy(options, RunRecord.read(options.run_folder))
    result = compare_run(options.run_folder, policy, options.data_set)
    path = write_atomically(options.run_folder / FILE_NAME, build_page(result).encode(), 0o600)
    for one in result.metrics:
        print(
            f"{one.name:<18} alone {one.best_alone:.4g}  federated {one.federated:.4g}  "
            f"difference {one.federated - one.best_alone:+.4g} ({one.low:+.3g} to {one.high:+.3g}): {one.verdict}"
        )
    options.tell(page=path, metrics=result.metrics)
    print(f"wrote {path}: for this site only, sent nowhere")
    return 0


def _policy(options: Options, record: RunRecord) -> SitePolicy:
    workspace = options.workspace
    if workspace is None:
        workspace = options.run_folder.resolve().parent.parent
        if not (workspace / POLICY_FILE).is_file():
            raise ConfigurationError("the run does not lie in the site's workspace: name that with --workspace DIR")
    return SitePolicy.load(own_workspace(workspace, record.site), record.site)
