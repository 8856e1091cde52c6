"""What travels between sites and server: frames, kinds of messages, channels, protected sums, their addition."""
