# Written by `python jobs/reference.py` from the jobs' declarations.
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.recipes.poc_env import VeilPocEnv as VeilPocEnv
from nvflare_plugins.recipes.recipe import JobRecipe as JobRecipe

__all__ = ['AlignmentRecipe', 'BaggingXGBRecipe', 'DpBoostRecipe', 'FederBoostVerticalRecipe', 'HorizontalXGBRecipe', 'JobRecipe', 'PrivateTreesRecipe', 'ProfileRecipe', 'SelectionRecipe', 'TuningRecipe', 'VerticalInferenceRecipe', 'VerticalTuningRecipe', 'VerticalXGBRecipe']

class AlignmentRecipe(JobRecipe):
    """Find the rows that all sites have, by private set intersection over their ids.

    Each site ends with the positions of its own common rows, in an order that all sites share, in the job's run folder
    (``alignment.npz``); vertical jobs name this job to use them. Which column holds the ids, each site's policy says
    (``veilboost site-setup --id NAME=COLUMN``).

        recipe = AlignmentRecipe("align_loans", data_sets=["loans", "loans_test"], sites=["bank", "shop", "telco"])
        recipe.export("jobs")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``alignment`` (jobs/REFERENCE.md).

    Args:
        data_sets: Names in every site's policy, such as those of the training and the evaluation set; each is aligned
            on its own.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it. However large a set is, a
            site works for a few seconds between two exchanges, and reads its files before the first.
    """
    def __init__(
        self,
        name: str,
        *,
        data_sets: Sequence[str],
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class BaggingXGBRecipe(JobRecipe):
    """Train XGBoost by bagging: each round every site grows a tree on its own rows, and all sites take all of them.

    A round costs one sealed message of a few kilobytes, whatever the number of rows. In return the other sites get each
    site's own trees, which tell of its rows alone; sites refuse that unless their policy consents
    (``share_own_trees``). ``HorizontalXGBRecipe`` shows pooled sums only, and gives the model of centralized training.

        recipe = BaggingXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``bagging`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the training set in every site's policy.
        label: Label column.
        params: XGBoost parameters, as for horizontal jobs, but for objectives with one output and a bounded hessian,
            every row at the same weight, and trees of depth 1 to 12. ``eval_metric`` has no effect: nothing is
            evaluated. Each tree counts 1/W of ``learning_rate``, W the number of sites. ``base_score`` is public, 0.5
            unless given: there is no exchange that would estimate it.
        num_rounds: Rounds; each adds one tree of every site, so that the model has as many trees as rounds times sites.
        features: Columns to train on, in this order; None means all columns of the file but the label.
        label_classes: Public list of label values; None means that labels are numbers.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        params: Mapping[str, Any] = ...,
        num_rounds: int = ...,
        features: Sequence[str] | None = ...,
        label_classes: Sequence[str | int] | None = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class DpBoostRecipe(JobRecipe):
    """Train DPBoost (Li et al., AAAI 2020) over sites that hold the same columns for other rows: pure epsilon.

    The server is trusted with exact sums over all sites: it chooses the splits and adds the noise. Sites must allow the
    profile dp_trusted. Where nobody is to be trusted so far, ``PrivateTreesRecipe`` is the better choice.

        recipe = DpBoostRecipe(
            name="abalone", data_set="abalone", label="rings", epsilon=4.0, label_bounds=(1, 29),
            feature_bounds={"length": (0, 1), "height": (0, 0.5)}, categories={"sex": ["F", "I", "M"]},
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``dpboost`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the training set in every site's policy, with an id column and a pure privacy budget. The ids
            choose the tree of each row.
        label: Label column: 0 and 1, or numbers within ``label_bounds``.
        epsilon: What this job spends.
        feature_bounds: Public (low, high) of every numeric feature.
        categories: Public list of each categorical column, in the order in which splits cut it; other values count as
            missing.
        features: Columns to train on, in this order; None takes those with bounds, then those with categories.
        label_bounds: Public (low, high) of the label of a regression, which is clamped to them; None for labels 0 and
            1.
        label_classes: Public list of the label's two values, if it is not 0 and 1.
        variant: ``dpboost``, or the slides' baselines ``para`` (equal shares of rows) and ``seq`` (each tree on all).
        n_trees: Trees in all, T.
        trees_per_ensemble: T_e, trees that share the rows; None puts all trees into one ensemble. Several ensembles
            share epsilon and boost one another: in our measurements that helped at epsilon 40 and more, if at all. At
            epsilon 1 to 10 one ensemble with all of the budget was best (tests/bench/RESULTS.md).
        depth: Levels of a tree.
        learning_rate: Learning rate, eta.
        ridge: Ridge of the leaves, lambda.
        start_share: Part of epsilon that pays for the mean of the label, from which a regression then starts; 0 starts
            from the middle of its bounds. 0.05 is a good choice unless the mean is known to lie there.
        n_candidates: Split candidates of a numeric feature, evenly spaced between its bounds.
        rows_per_person: Most rows of one person; the noise grows with it.
        profile:
        tracking:
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it from the job's size.
        on_lost_site: When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and,
            when the site is back, goes on under fresh keys and without a new submission: what the server has answered
            is not asked again, and the exchange in which the site was lost is repeated for the same answer, at no
            charge.
        lost_site_deadline_s: How long ``on_lost_site="wait"`` waits for a lost site, each time.
        most_attempts: Attempts of a job that waits; each try after a loss, or after what time mends, is one.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        epsilon: float,
        feature_bounds: Mapping[str, Sequence[float]] = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        features: Sequence[str] | None = ...,
        label_bounds: Sequence[float] | None = ...,
        label_classes: Sequence[str | int] | None = ...,
        variant: str = ...,
        n_trees: int = ...,
        trees_per_ensemble: int | None = ...,
        depth: int = ...,
        learning_rate: float = ...,
        ridge: float = ...,
        start_share: float = ...,
        n_candidates: int = ...,
        rows_per_person: int = ...,
        profile: str = ...,
        tracking: bool = ...,
        deadline_s: float = ...,
        on_lost_site: str = ...,
        lost_site_deadline_s: float = ...,
        most_attempts: int = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class FederBoostVerticalRecipe(JobRecipe):
    """Train over parties that hold other columns of the same rows, under local differential privacy of each value.

    The passive parties send the bucket of every value once, randomised; the active party, which has the label, trains
    stock XGBoost on them. What is public about a passive party's features stands in a file at that party.

        recipe = FederBoostVerticalRecipe(
            name="credit", data_set="credit", active="bank", label="default", epsilon=4.0, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``federboost_vertical``
    (jobs/REFERENCE.md).

    Args:
        data_set: Name of the training set in every party's policy; its files share their rows by the id column.
        active: The site with the label.
        label: Label column there.
        features: The active party's own features; None means all columns of its file but label and id.
        params: XGBoost parameters.
        num_rounds: Boosting rounds.
        epsilon: What each passive party spends, for one ``unit``, edges included.
        unit: ``value`` (the paper's: one value of one row) or ``row`` (all its features together), see ``Unit``.
        edges_epsilon: The part of epsilon that pays for equal-count buckets; 0 takes buckets of equal widths, which
            hardly divide a column with a long tail. None takes a tenth of epsilon where a party describes a feature by
            bounds, else nothing.
        n_buckets: Most buckets of a feature; a discrete feature has at most as many as values.
        description: Name of the file in each passive party's input folder that says what is public about its features.
        alignment: Id of the alignment job that found the common rows; None takes all rows, which must be the same at
            all parties.
        buckets_from: Id of an earlier job, whose buckets the active party has kept: it trains on them again, on the
            same rows, and nothing is sent by passive parties or charged to them. Either all parties of that job take
            part, who then get their splits, or the active one alone, whose model no other party can answer for.
        profile:
        tracking:
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it from the data's size.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        active: str,
        label: str,
        features: Sequence[str] | None = ...,
        params: Mapping[str, Any] = ...,
        num_rounds: int = ...,
        epsilon: float = ...,
        unit: str = ...,
        edges_epsilon: float | None = ...,
        n_buckets: int = ...,
        description: str = ...,
        alignment: str | None = ...,
        buckets_from: str | None = ...,
        profile: str = ...,
        tracking: bool = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class HorizontalXGBRecipe(JobRecipe):
    """Train XGBoost over sites that hold the same columns for other rows, every private message protected.

    The job names a data set; where it lies, and what a job may do there, each site's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

        recipe = HorizontalXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``horizontal`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the training set in every site's policy.
        label: Label column; for survival:aft the columns of times, as {'time': ..., 'event': ...} (1 seen, 0 not),
            {'signed': ...} (below 0 where none was seen) or {'lower': ..., 'upper': ...}, of which a missing one has no
            limit.
        params: XGBoost parameters (jobs/MODEL.md lists the supported ones); recipes refuse others at once.
        num_rounds: Boosting rounds.
        profile: ``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``,
            a plugin that every site's policy names (``plugins``).
        eval_data_set: Name of an evaluation set in every site's policy; evaluated after each round.
        evaluate_training: Evaluate the training set too, which costs one exchange per metric and round.
        pooled_metrics: After training, metrics of the final model on the evaluation rows of all sites together go into
            each site's report: AUC, average precision (AUCPR) and Kolmogorov-Smirnov as intervals, calibration,
            thresholds. For two classes, with an eval_data_set; every site's policy must consent (`score_histogram`).
            They are never streamed.
        weight: Column of sample weights. Another one over the same rows counts as changed rows at the sites'
            registries.
        query: Column that says which rows are ranked together, of objectives `rank:*`; it is no feature. A query's rows
            lie at one site, and equal names at two sites are two queries. Weights are those of queries, the same in
            each row of one. Another column over the same rows counts as changed rows at the sites' registries.
        compare_queries: Refuse the job if a query's name stands at several sites. Every site's policy must consent
            (`compare_queries`).
        features: Columns to train on, in this order; None means all columns of the file but label, weight and query.
        categories: Public category list of each categorical column.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values; None means that labels are numbers (classes 0 .. k-1).
        cuts: How the histogram's cut points are agreed: `quantile`, `exact`, `uniform` or `logarithmic`.
        cut_bounds: Public (low, high) of each feature, for `uniform` and `logarithmic`.
        min_rows_per_cut: `quantile` stops where fewer pooled rows would be singled out.
        time_bins: Most bins of times of ``survival:cox``, in which events are tied. Each holds at least
            ``min_rows_per_cut`` pooled events, or the sites' ``min_rows_per_node`` where that is more, so that there
            may be fewer.
        early_stopping_rounds: Stop after so many rounds without improvement of the last metric on the last set.
        checkpoint_every: Rounds between checkpoints at the site; 0 keeps none.
        initial_model: Name of a model file in every site's input folder that training continues by num_rounds.
        continue_from: Id of a finished job whose model training continues by num_rounds, on new rows only: none that
            this job's chain has trained on. It is read from every site's own run of that job.
        resume_from: Id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All
            other fields stay as they were in that job, initial_model and continue_from included. Without sampling of
            columns or dropped trees the model is that of an uninterrupted job; random draws of these are not those it
            would have made.
        forgets: Id of a finished job that is trained again without the persons whom its sites have queued (`veilboost
            forget`), from the start, cut points and all; its other fields are those of that job. Three sites have to
            leave out ten rows each, 1,000 in all, or consent (`recompute_with_changes`). A site that was in that job
            may be left out of this one, if the sites consent (`continue_without_site`) and that job said
            ``on_lost_site="continue"``.
        engine: Who grows the trees. ``own``: the sites themselves, as XGBoost would, under any XGBoost from 3.2 on.
            ``xgboost``: stock XGBoost beside a mediator: XGBoost 3.2 or 3.3, the same at all sites. ``auto``: ``own``,
            but ``xgboost`` for dart and vector leaves, which the sites do not grow.
        arithmetic: Whose arithmetic ``own`` follows, to the bit: that of XGBoost 3.2, 3.3 or 3.4; ``auto`` takes that
            of the lowest XGBoost among the sites.
        word_bits: Bits of the words of histograms: 64, or 32 for half the bytes, where the sites grow the trees under
            `masks` or `plain`. With 32 a row's gradient keeps 12 bits or more, so that trees may differ from those of
            centralized training. For up to 524,287 pooled rows without weights, of two or more classes.
        tracking: Stream the pooled metrics of each round to the server.
        finest_exponent: No grid of sums is finer than 2^finest_exponent; set it to compare profiles bit for bit.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it from the data's size.
        on_lost_site: When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and,
            when the site is back, goes on from the last round that all sites have finished, under fresh keys and
            without a new submission. Each round is then a checkpoint, whatever ``checkpoint_every`` says. ``continue``
            does the same and, where the site is not back within 15 seconds, goes on without it, if every site's policy
            consents (`continue_without_site`) and ``min_clients`` sites are left; where it cannot, it waits. Rounds
            after that are not evaluated.
        lost_site_deadline_s: How long a job waits for a lost site, each time.
        most_attempts: Attempts of a job that waits; each try after a loss, or after what time mends, is one.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str | Mapping[str, str],
        params: Mapping[str, Any] = ...,
        num_rounds: int = ...,
        profile: str = ...,
        eval_data_set: str | None = ...,
        evaluate_training: bool = ...,
        pooled_metrics: bool = ...,
        weight: str | None = ...,
        query: str | None = ...,
        compare_queries: bool = ...,
        features: Sequence[str] | None = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        cuts: str = ...,
        cut_bounds: Mapping[str, Sequence[float]] = ...,
        min_rows_per_cut: int = ...,
        time_bins: int = ...,
        early_stopping_rounds: int | None = ...,
        checkpoint_every: int = ...,
        initial_model: str | None = ...,
        continue_from: str | None = ...,
        resume_from: str | None = ...,
        forgets: str | None = ...,
        engine: str = ...,
        arithmetic: str = ...,
        word_bits: int = ...,
        tracking: bool = ...,
        finest_exponent: int | None = ...,
        deadline_s: float = ...,
        on_lost_site: str = ...,
        lost_site_deadline_s: float = ...,
        most_attempts: int = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class PrivateTreesRecipe(JobRecipe):
    """Train trees under differential privacy over sites that hold the same columns for other rows.

    Each site's policy must give the data set a privacy budget, from which its ledger pays for the job. Everything here
    is public and must come from public knowledge: bounds, category lists, delta.

        recipe = PrivateTreesRecipe(
            name="credit", data_set="credit2", label="label", epsilon=0.5, delta=1e-6,
            feature_bounds={"AGE": (18, 100), "LIMIT_BAL": (0, 1_000_000)}, features=["AGE", "LIMIT_BAL"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``private_trees`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the training set in every site's policy, which must give it a privacy budget.
        label: Label column: 0 and 1, ``label_classes``, or numbers within ``label_bounds``; or columns of times within
            ``label_bounds``, as in horizontal jobs.
        epsilon: What this job may spend.
        delta: What this job may spend; delta is given, never computed from the data. Left out with ``pure``: there is
            none.
        feature_bounds: Public (low, high) of every numeric feature; values outside are clipped to it.
        categories: Public category list of each categorical column; unknown categories count as missing.
        features: Columns to train on, in this order; None means all columns of the file but label and weight. Each
            needs bounds or categories.
        label_classes: Public list of the label's values. Of two, the second one is the positive one; of more, each has
            a probability. A class that no row has is learnt to be rare.
        label_bounds: Public (low, high) of the label of a regression, in its own units; a label outside counts as the
            bound. Training starts from their middle, and half of their distance is the unit of the noise. None for
            classes. For times they are above 0, training starts from their geometric middle, and the noise is in units
            of `aft_loss_distribution_scale`.
        aft_loss_distribution: For times: XGBoost's parameter, the noise of their logarithms.
        aft_loss_distribution_scale: For times: XGBoost's parameter, the scale of that noise.
        method: A preset: ``default`` (now ``default_2026_12``), ``default_2026_11``, ``few_rounds``, ``pure`` (epsilon
            without a delta), or a paper's name such as ``dp_rf`` (methods.py).
        components: Components of the method to exchange one by one: ``split_method`` (C1), ``weight_update`` (C2),
            ``candidates`` (C3), ``interactions`` and ``n_features_per_tree`` (A1), ``batch_size`` (A2), ``query``,
            ``n_trees``, ``depth``, ``n_candidates``, ``learning_rate``, ``ridge``, ``noise_ridge``, ``clip``,
            ``hessian_rounds``, ``candidate_share``, and ``grower``: ``sites`` (the default) or, for totally random
            trees of two classes, ``xgboost`` (the same: the sites grow what XGBoost's refresh would set).
        trust: ``distributed`` (each site adds a share of the noise under masks), ``trusted_aggregator`` (the server
            sees exact sums and adds the noise once) or ``local`` (a baseline: every row is noised by itself).
        colluders: Sites that may pool what they know, the observer included; distributed noise holds against so many.
        n_sites: Number of sites that the noise is meant for; None means those that take part.
        n_rows: Number of all sites' rows, declared public; only ``local`` needs it, for the ridge.
        noise: Whose noise it is: empty for ours, or ``plugin.NAME``, a mechanism of others that the server and every
            site's policy pin by the hash of its files. Its price is derived from its mass function. For pure methods
            without paid candidates under ``trusted_aggregator`` alone.
        rows_per_person: Most rows of one person; the noise grows with it.
        structure_seed: Public seed of the random trees. The guarantee holds for every seed, so that nothing is gained
            by agreeing on it in secret, and a resumed job must draw the same trees. Noise never comes from it.
        weight: Column of row weights; needs ``max_weight``, the public largest one, to which they are clipped.
        max_weight: The public bound of row weights, to which they are clipped.
        resume_from: Id of an interrupted job of the same terms under distributed noise, on the same rows: what it has
            released is replayed from the sites' ledgers at no charge, by all of them or by none.
        tracking: Must be False: metrics are not paid for.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it from the job's size.
        on_lost_site: When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and,
            when the site is back, goes on under fresh keys and without a new submission: what was released is replayed
            from the sites' ledgers at no charge, noise included. Not with a trusted aggregator, whose noise is gone.
        lost_site_deadline_s: How long ``on_lost_site="wait"`` waits for a lost site, each time.
        most_attempts: Attempts of a job that waits; each try after a loss, or after what time mends, is one.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str | Mapping[str, str],
        epsilon: float,
        delta: float | None = ...,
        feature_bounds: Mapping[str, Sequence[float]] = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        features: Sequence[str] | None = ...,
        label_classes: Sequence[str | int] | None = ...,
        label_bounds: Sequence[float] | None = ...,
        aft_loss_distribution: str = ...,
        aft_loss_distribution_scale: float = ...,
        method: str = ...,
        components: Mapping[str, Any] = ...,
        trust: str = ...,
        colluders: int = ...,
        n_sites: int | None = ...,
        n_rows: int | None = ...,
        noise: str = ...,
        rows_per_person: int = ...,
        structure_seed: int = ...,
        weight: str | None = ...,
        max_weight: float | None = ...,
        resume_from: str | None = ...,
        tracking: bool = ...,
        deadline_s: float = ...,
        on_lost_site: str = ...,
        lost_site_deadline_s: float = ...,
        most_attempts: int = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class ProfileRecipe(JobRecipe):
    """Look at the data of all sites before a horizontal training: missing values, rates, information value.

    Each site gets ``profile.json``, whose ``ranking`` lists columns for ``features`` of a training, ``profile.html``
    and, about its own rows, ``local.html``. Cut points are searched once: a later ``HorizontalXGBRecipe`` over the same
    data, sites, ``max_bin`` and ``min_rows_per_cut`` uses them again. Sites refuse it unless their policy consents
    (``feature_profile``).

        recipe = ProfileRecipe(name="look", data_set="credit", label="default")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``profile`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the data set in every site's policy.
        label: Label column.
        profile: ``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``,
            a plugin that every site's policy names (``plugins``).
        features: Columns to look at; None means all columns of the file but the label.
        categories: Public category list of each categorical column. Where rows are few, neighbours in the list are
            counted together.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values, at most 64; None means that labels are 0 and 1. With more than two,
            each class is compared with all others.
        max_bin: Bins per feature whose cut points are searched, as XGBoost's parameter of this name. A later training
            over the same data with equal max_bin and min_rows_per_cut uses the cut points again.
        min_rows_per_cut: The cut search stops where fewer pooled rows would be singled out, and bins are merged until
            each holds as many pooled rows of every class. At least what every site's policy asks for.
        monotonic: Join neighbouring bins of numbers so that the share of the second class rises throughout, or falls,
            at the largest information value: what scorecards want, and optbinning does. For two classes.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        profile: str = ...,
        features: Sequence[str] | None = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        max_bin: int = ...,
        min_rows_per_cut: int = ...,
        monotonic: bool = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class SelectionRecipe(JobRecipe):
    """Select columns over all sites: backward elimination by cross validation, and information values by fold.

    Each site gets ``selection.csv``, ``selection_steps.csv``, ``selection.json``, ``selection.html`` and
    ``train_chosen.py``, which writes the job that trains on the chosen columns. Sites take part if their policy allows
    as many sets of columns times folds times rounds (``tuning``), and counts by columns and label
    (``feature_profile``).

        recipe = SelectionRecipe(
            name="select", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=30
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``selection`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the data set in every site's policy.
        label: Label column, or columns of times, as in horizontal jobs.
        params: XGBoost parameters of every training (jobs/MODEL.md lists the supported ones). The last `eval_metric`
            decides. `monotone_constraints` name columns.
        folds: Folds: each set of columns is trained on once for each, on all other folds, and scored on it.
        group: Column that says which rows belong together, as in a tuning. It is no feature.
        num_rounds: Boosting rounds of each training.
        min_features: Columns at which elimination ends.
        step: Columns that are taken away at once, those of least importance.
        importance: By what columns are taken away, as the mean over the folds. ``gain``: share of the trees' loss
            change. ``permutation``: how much worse the fold's score is where each site deals the column's values out
            anew among its rows. All sites learn these scores.
        rule: ``one_standard_error``: the fewest columns whose mean score is within a standard error of the best one.
            ``best``: those of the best mean score.
        shadows: Further trainings for each fold with all columns and a permuted copy of each, as Boruta does: how often
            a column's gain is above that of every copy. Each site draws the permutations, of its own rows, from a
            secret.
        information_value: Count also the information value of each column by fold, for which every policy must consent
            (`feature_profile`). For labels that are classes.
        profile: ``masks`` or ``bfv``.
        features: Columns to begin with; None means all columns of the file but label and group.
        categories: Public category list of each categorical column.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values; None means that labels are numbers (classes 0 .. k-1).
        min_rows_per_cut: The one cut search stops where fewer pooled rows would be singled out. Bins of information
            values hold as many pooled rows of every class in every fold.
        arithmetic: Whose arithmetic the sites follow, as in horizontal jobs.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str | Mapping[str, str],
        params: Mapping[str, Any] = ...,
        folds: int = ...,
        group: str | None = ...,
        num_rounds: int = ...,
        min_features: int = ...,
        step: int = ...,
        importance: str = ...,
        rule: str = ...,
        shadows: int = ...,
        information_value: bool = ...,
        profile: str = ...,
        features: Sequence[str] | None = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        min_rows_per_cut: int = ...,
        arithmetic: str = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class TuningRecipe(JobRecipe):
    """Try parameter sets by cross validation over sites that hold the same columns for other rows.

    Each site gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job that
    trains the best parameters on all rows. Sites refuse it unless their policy allows as many trials times folds times
    rounds (``tuning``).

        recipe = TuningRecipe(
            name="tune", data_set="credit", label="default", params={"objective": "binary:logistic"},
            search={"eta": {"low": 0.02, "high": 0.3, "log": True}, "max_depth": [3, 4, 6]}, n_trials=8,
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``tuning`` (jobs/REFERENCE.md).

    Args:
        data_set: Name of the data set in every site's policy.
        label: Label column, or columns of times, as in horizontal jobs.
        params: XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric
            that decides (the last `eval_metric`), `max_bin`, constraints.
        trials: List of parameter sets to try, each as objects of XGBoost parameters; this or `search`.
        search: Random search: for each parameter a list of values, or a range such as `{"low": 0.01, "high": 0.3,
            "log": true}` (`"whole": true` for whole numbers). All sites draw the same sets
            (nvflare_plugins/kinds/tuning/job.py says how).
        n_trials: How many different sets `search` draws.
        seed: Seed of `search`, public like the whole job. Folds are never drawn from it.
        folds: Folds: each trial trains once for each, on all other folds, and is scored on it.
        group: Column that says which rows belong together, such as a person's: they are never in two folds of a site.
            It is no feature.
        num_rounds: Most boosting rounds of each training.
        early_stopping_rounds: End a training after so many rounds without improvement of the last metric on its fold;
            its best round counts.
        profile: ``masks`` or ``bfv``.
        features: Columns to train on, in this order; None means all columns of the file but label and group.
        categories: Public category list of each categorical column.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values; None means that labels are numbers (classes 0 .. k-1).
        min_rows_per_cut: The one cut search stops where fewer pooled rows would be singled out.
        engine: Who grows the trees of the trials, as in horizontal jobs: ``own``, ``xgboost``, or ``auto``.
        arithmetic: Whose arithmetic ``own`` follows, as in horizontal jobs.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it.
    """
    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str | Mapping[str, str],
        params: Mapping[str, Any] = ...,
        trials: Sequence[Mapping[str, Any]] | None = ...,
        search: Mapping[str, Any] | None = ...,
        n_trials: int | None = ...,
        seed: int = ...,
        folds: int = ...,
        group: str | None = ...,
        num_rounds: int = ...,
        early_stopping_rounds: int | None = ...,
        profile: str = ...,
        features: Sequence[str] | None = ...,
        categories: Mapping[str, Sequence[str | int]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        min_rows_per_cut: int = ...,
        engine: str = ...,
        arithmetic: str = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class VerticalInferenceRecipe(JobRecipe):
    """Predict, explain, merge, or score rows as they are asked for, with a vertical model, by all of its parties.

    Every site holds its part of the model since the training (``veilboost_runs/<job id>/``). The result is written at
    the active party, in the run folder of this job: ``predictions.parquet``, ``contributions.parquet`` or
    ``merged_model.json``, and ``importance.csv``.

        recipe = VerticalInferenceRecipe(
            "score_loans", model="5d0c...", data_set="loans_2026", alignment="first", sites=["bank", "shop", "telco"]
        )
        recipe.export("jobs")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical_inference``
    (jobs/REFERENCE.md).

    Args:
        model: Id of the job that trained the model. Every site reads its part from that job's run folder, or from
            ``<id>.<site>.json`` in its input folder.
        action: ``predict``; ``explain`` (SHAP values; every passive party's policy must consent to ``explain``);
            ``merge`` (one ordinary XGBoost model; every passive party must consent to ``merge_model``); or ``serve``
            (the job stays and scores rows as they are asked for at the active party; every passive party must consent
            to ``scoring``).
        data_set: Name in every site's policy of the rows to predict or explain.
        rows: [first, end): positions in the aligned set; None takes all of it.
        unknown_category_is_missing: Treat categories outside the model's public lists as missing instead of refusing
            the data.
        rounds: ``all``, ``best`` (up to the best round of early stopping), or [first, end) boosting rounds.
        alignment: ``first`` finds the common rows by private set intersection; the id of a finished job of the same
            sites takes those that it found (a training job that aligned this data set will do; a set is aligned only
            once); None means that the files of all sites hold the same rows in the same order.
        file_format: ``parquet`` or ``csv``.
        batch_rows: Rows that are on their way at the same time; the result does not depend on it. With ``serve`` also
            the most rows of one request.
        serve_s: With ``serve``: how long the job stays, in seconds; 0 sets no limit. It counts from the start of an
            attempt: anew after a lost site is back.
        idle_s: With ``serve``: the job ends when nobody has asked for so many seconds; 0 sets no limit.
        evidence_mib: With ``serve``: the job ends when the active party's evidence has this size in MiB.
        on_lost_site: With ``serve``, when a site is lost: ``stop`` ends the job; ``wait`` pauses it up to
            ``lost_site_deadline_s`` and, when the site is back, goes on in the same job with a new handshake, with the
            alignment that was in use.
        lost_site_deadline_s: How long ``on_lost_site="wait"`` waits for a lost site, each time.
        most_attempts: Attempts of a job that waits; each try after a loss, or after what time mends, is one.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it.
    """
    def __init__(
        self,
        name: str,
        *,
        model: str,
        action: str = ...,
        data_set: str | None = ...,
        rows: Sequence[int] | None = ...,
        unknown_category_is_missing: bool = ...,
        rounds: str | Sequence[int] = ...,
        alignment: str | None = ...,
        file_format: str = ...,
        batch_rows: int = ...,
        serve_s: float = ...,
        idle_s: float = ...,
        evidence_mib: int = ...,
        on_lost_site: str = ...,
        lost_site_deadline_s: float = ...,
        most_attempts: int = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class VerticalTuningRecipe(JobRecipe):
    """Try parameter sets by cross validation over parties that hold other columns of the same rows.

    The active party gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job
    that trains the best parameters on all rows; the others get nothing but their reports. Parties refuse it unless
    their policy allows as many trials times folds times rounds (``tuning``) and, passive ones, ``exact_bins``.

        recipe = VerticalTuningRecipe(
            "tune", active="bank", data_set="loans", label="default", alignment="first", profile="elgamal",
            params={"objective": "binary:logistic"}, trials=[{"eta": 0.1}, {"eta": 0.3}], sites=["bank", "shop"],
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical_tuning`` (jobs/REFERENCE.md).

    Args:
        active: Site that has the label; all other sites of the job are passive parties.
        data_set: Name of the data set in every site's policy.
        label: Label column at the active party, or its columns of times, as in horizontal jobs.
        params: XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric
            that decides (the last `eval_metric`), `max_bin`, constraints.
        trials: List of parameter sets to try, each an object of XGBoost parameters; this or `search`.
        search: Random search, as of kind `tuning`.
        n_trials: How many different sets `search` draws.
        seed: Seed of `search`, public like the whole job. Folds are never drawn from it.
        folds: Folds, drawn by the active party alone: each trial trains once for each, on all others, and is scored on
            it.
        group: Column of the active party that says which rows belong together; they are never in two folds. It is no
            feature.
        num_rounds: Most boosting rounds of each training.
        early_stopping_rounds: End a training after so many rounds without improvement of the last metric on its fold;
            its best round counts.
        profile: ``paillier``, ``elgamal``, or ``plain``, which parties refuse unless they consent.
        key_bits: Length of the keys that the active party generates, one for each training; ``elgamal`` has 128-bit
            strength.
        preset: ``exact``, which parties refuse unless they consent; ``guarded`` is refused.
        features: By site, the columns to train on in this order; a site that is not named takes all columns of its file
            but label, group and id.
        categories: By site, the public category list of each of its categorical columns.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values; None means that labels are numbers (classes 0 .. k-1).
        alignment: ``first`` finds the common rows by private set intersection before training; the id of a finished job
            of the same sites takes those that it found; None means that the files of all sites hold the same rows in
            the same order.
        deadline_s: Longest silence of a site, and longest time for one answer; 0 means 10 minutes and one hour.
    """
    def __init__(
        self,
        name: str,
        *,
        active: str,
        data_set: str,
        label: str | Mapping[str, str],
        params: Mapping[str, Any] = ...,
        trials: Sequence[Mapping[str, Any]] | None = ...,
        search: Mapping[str, Any] | None = ...,
        n_trials: int | None = ...,
        seed: int = ...,
        folds: int = ...,
        group: str | None = ...,
        num_rounds: int = ...,
        early_stopping_rounds: int | None = ...,
        profile: str = ...,
        key_bits: int = ...,
        preset: str = ...,
        features: Mapping[str, Sequence[str]] = ...,
        categories: Mapping[str, Mapping[str, Sequence[str | int]]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        alignment: str | None = ...,
        deadline_s: float = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...

class VerticalXGBRecipe(JobRecipe):
    """Train XGBoost over parties that hold other columns of the same rows; one of them has the label.

    The job names a data set; where it lies, and what a job may do there, each party's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job. In the preset ``guarded`` max_bin is 32
    unless given: what parties allow by default.

        recipe = VerticalXGBRecipe(
            "credit", active="bank", data_set="loans", label="default", alignment="first",
            params={"objective": "binary:logistic", "max_bin": 32}, num_rounds=20, sites=["bank", "shop", "telco"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical`` (jobs/REFERENCE.md).

    Args:
        active: Site that has the label; all other sites of the job are passive parties.
        data_set: Name of the training set in every site's policy.
        label: Label column at the active party, or its columns of times, as in horizontal jobs.
        params: XGBoost parameters (jobs/MODEL.md lists the supported ones). Columns of passive parties have the names
            ``<site>.<alias>`` in constraints. With ``subsample`` below 1 the active party replaces ``seed`` by a secret
            one, which its ``run.json`` names: a public seed would tell which rows a tree sampled.
        num_rounds: Boosting rounds.
        profile: ``paillier``, ``elgamal``, or ``plain``, which parties refuse unless they consent; or ``scheme.NAME``,
            a plugin's scheme that every party's policy, and the server's, pins (``plugins``).
        key_bits: Length of the key that the active party generates for this job alone; ``elgamal`` has 128-bit strength
            always.
        fraction_bits: Bits of gradients under ``elgamal``: 40 for the centralized model, or 20, which is cheaper and
            another model; 14 in preset ``noised``, and only there.
        point_bytes: Bytes of a point under ``elgamal``: 64, or 32, which halves the traffic and costs a square root for
            each point that is read. The model is the same. ``veilboost plan`` says for which lines it pays.
        preset: ``guarded``; ``exact``, which equals centralized training; ``noised``, whose sums are differentially
            private given the split bits; or ``sealed``, which opens no sum, for exactly two parties under ``paillier``.
            Parties refuse all but ``guarded`` unless they consent.
        epsilon: Preset ``noised``: what each passive party's sums and cut points may cost, for a change of one row's
            features at that party. Split bits are outside of it.
        delta: Preset ``noised``: the delta of ``epsilon``, never computed from the data.
        noised_features: Preset ``noised``: most features of a passive party in a tree, drawn anew for each where it has
            more.
        noised_bins: Preset ``noised``: bins of a passive party's features; ``max_bin`` is then the active party's
            alone.
        noised_repeats: Preset ``noised``: rounds that ``on_lost_site="wait"`` may train, and passive parties pay for, a
            second time. A loss takes one or two. ``epsilon`` covers them, so that noise is as if there were so many
            rounds more.
        own_rounds: First rounds that use the active party's columns alone (Completely SecureBoost).
        eval_data_set: Name of an evaluation set in every site's policy; evaluated after each round. Passive parties
            charge its rows as one prediction.
        evaluate_training: Evaluate the training set too.
        weight: Column of sample weights at the active party. They stay there: the cut points of other parties' columns
            are those of unweighted rows. Noise of preset ``noised`` is meant for the heaviest row, whose gradients fill
            the format.
        query: Column at the active party that says which rows are ranked together, of objectives ``rank:*``; it is no
            feature and stays there. Weights are those of queries, the same in each row of one.
        features: By site, the columns to train on in this order; a site that is not named takes all columns of its file
            but label, weight, query and id. An empty list at the active party: it has the label alone.
        categories: By site, the public category list of each of its categorical columns. All sites and the server read
            the lists, with the columns' names. A category has a bin of its own; guarded jobs put rare ones together.
        unknown_category_is_missing: Treat other categories as missing instead of refusing the data.
        label_classes: Public list of label values; None means that labels are numbers (classes 0 .. k-1).
        alignment: ``first`` finds the common rows by private set intersection before training; the id of a finished job
            of the same sites takes those that it found; None means that the files of all sites hold the same rows in
            the same order.
        early_stopping_rounds: Stop after so many rounds without improvement of the last metric on the last set.
        checkpoint_every: Rounds between checkpoints at every site; 0 keeps none. One costs milliseconds, a lost round
            the time of its encryption and, in guarded jobs, what the passive parties' caps were charged for it.
        initial_model: Id of a finished vertical job whose model training continues by num_rounds.
        resume_from: Id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All
            other fields stay as they were in that job, initial_model included. A job that was lost after its last round
            is brought to its end. Without sampling of rows or columns the model is that of an uninterrupted job, byte
            for byte; random draws are not those it would have made. In preset ``noised`` passive parties pay for the
            rounds from the checkpoint on and for new cut points, beside what the interrupted job has spent.
        tracking: Stream the metrics of each round to the server.
        deadline_s: Longest silence of a site, and longest time for one answer; 0 means 10 minutes and one hour.
        on_lost_site: When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and,
            when the site is back, goes on from the last round that all parties have finished, under fresh keys and
            without a new submission. Each round is then a checkpoint, whatever ``checkpoint_every`` says.
        lost_site_deadline_s: How long ``on_lost_site="wait"`` waits for a lost site, each time.
        most_attempts: Attempts of a job that waits; each try after a loss, or after what time mends, is one.
    """
    def __init__(
        self,
        name: str,
        *,
        active: str,
        data_set: str,
        label: str | Mapping[str, str],
        params: Mapping[str, Any] = ...,
        num_rounds: int = ...,
        profile: str = ...,
        key_bits: int = ...,
        fraction_bits: int = ...,
        point_bytes: int = ...,
        preset: str = ...,
        epsilon: float | None = ...,
        delta: float | None = ...,
        noised_features: int = ...,
        noised_bins: int = ...,
        noised_repeats: int = ...,
        own_rounds: int = ...,
        eval_data_set: str | None = ...,
        evaluate_training: bool = ...,
        weight: str | None = ...,
        query: str | None = ...,
        features: Mapping[str, Sequence[str]] = ...,
        categories: Mapping[str, Mapping[str, Sequence[str | int]]] = ...,
        unknown_category_is_missing: bool = ...,
        label_classes: Sequence[str | int] | None = ...,
        alignment: str | None = ...,
        early_stopping_rounds: int | None = ...,
        checkpoint_every: int = ...,
        initial_model: str | None = ...,
        resume_from: str | None = ...,
        tracking: bool = ...,
        deadline_s: float = ...,
        on_lost_site: str = ...,
        lost_site_deadline_s: float = ...,
        most_attempts: int = ...,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None: ...
