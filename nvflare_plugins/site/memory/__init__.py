"""What a site remembers between jobs, so that many jobs together tell no more than it allows."""
