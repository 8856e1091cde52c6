"""An example of a package that others write for VeilBoost."""
