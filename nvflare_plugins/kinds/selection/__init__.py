"""Feature selection: backward elimination by cross validation, information values by fold, and shadow columns."""
