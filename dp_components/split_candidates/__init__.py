"""C3: where trees may split. One method of the paper per file."""
