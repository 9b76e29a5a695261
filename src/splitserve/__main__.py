"""`python -m splitserve`."""

from splitserve.cli import main

if __name__ == "__main__":
    main()
