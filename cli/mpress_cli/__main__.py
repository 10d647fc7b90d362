"""`python -m mpress_cli` is `mpress-plan`."""

from mpress_cli.app import main

if __name__ == "__main__":
    main()
