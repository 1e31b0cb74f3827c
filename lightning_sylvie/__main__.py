"""``python -m lightning_sylvie``."""

from lightning_sylvie.cli import main

if __name__ == "__main__":
    main()
