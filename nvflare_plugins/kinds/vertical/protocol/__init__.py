"""What the parties of a vertical job say to each other, and how it travels."""
