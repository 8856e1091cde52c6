"""C3: where trees may split."""
