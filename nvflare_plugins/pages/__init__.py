"""What a run leaves for people: its record, and the report made from it."""
