"""Differential-privacy components. Imports neither nvflare nor xgboost, and of he_processors its randomness only.

How a private quantity comes to be, from the rows to the site's ledger:

    rows = clip_logistic_rows(grad, hess, relation=NeighbouringRelation.ADD_OR_REMOVE_ROW)      sensitivity.py
    rows.values        int64[n_rows, 2] on the grid 2^-20;  rows.sensitivity travels with them
    sums = ...         int64[n_leaves, 2]; ``grid_integers`` takes double sums of grid values back to integers
    release = add_noise(sums, rows.sensitivity, noise_multiplier)       Gaussian, or Laplace (L1 norm)     mechanisms.py
    release.value, release.event     what may leave, and the event that pays for it
    noise_event(n_values, sensitivity, noise_multiplier, n_shares=1)     the same event beforehand, for a plan

    gaussian_limit(epsilon, delta)   -> PrivacyCost: what Gaussian queries may cost     accounting.py
    compose(events)  -> PrivacyCost: .epsilon(delta), .delta(epsilon)                   accounting.py
    DisjointPartEvent(event, partition, part)           rows in disjoint parts: the costliest part counts   events.py
    check_second_opinion(events, delta)                 asked by ledger.open_job too    accounting.py

    shares = NoiseShares(n_sites=3, n_colluders=1)      every site adds its part of the noise   mechanisms.py
    add_noise_share(site_sums, sensitivity, noise_multiplier, shares) -> Release

    ledger = Ledger.open(folder, LedgerIdentity(site, data_set, relation), Budget(epsilon, delta))     ledger.py
    ledger.open_job(job_id, plan)                       refuses a plan that would overdraw; ``quote`` is the dry run
    ledger.release(job_id, query, make) -> int64 array: ``make()`` returns the Release; it is charged durably before it
                                        is handed out, and the same query again gets the same reply at no charge
    ledger.close_job(job_id)                            frees what the plan did not use

Papers: split_methods (C1), leaf_weights (C2), split_candidates (C3), feature_interactions (A1) and batched_updates (A2)
are Maddock et al.'s components; dpboost is Li et al.'s DPBoost; bucket_ldp is FederBoost's vertical mechanism.

Further mechanisms: ``add_laplace_noise``, ``choose_exponentially``, ``randomise_buckets``. Errors: errors.py.
"""
