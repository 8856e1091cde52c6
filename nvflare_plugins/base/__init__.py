"""What every part stands on: errors, declared documents, checks, files, texts."""
