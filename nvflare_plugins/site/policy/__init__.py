"""What a site allows: values apart from the file they are read from."""
