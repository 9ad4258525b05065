"""`python -m dif` runs the command-line program."""

from dif.cli import main

if __name__ == "__main__":
    main()
