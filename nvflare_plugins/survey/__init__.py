"""All that a job would stumble over in a data set, found at once and at this site alone."""
