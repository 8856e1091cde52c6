"""Profile of data that several sites hold: what single features tell of the label, before anything is trained."""
