"""C sources of the native big-number backend and, where a compiler was at hand, the extension built from them."""
