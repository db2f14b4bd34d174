"""``python -m dtrain`` is the console script ``dtrain``."""

from __future__ import annotations

from dtrain.cli.main import main

if __name__ == "__main__":
    main()
