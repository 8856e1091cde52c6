"""What every kind of job does at a site: session, agreement on terms, payment, run folder, conclusion."""
