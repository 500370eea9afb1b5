"""`python -m rlite` is the `rlite` command."""

from rlite.cli import main

if __name__ == "__main__":
    main()
