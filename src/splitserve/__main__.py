"""Entry point of `splitserve` and `python -m splitserve`. Installs signal handlers before the slow imports."""

import sys

from splitserve.process.process_end import install, leave, watch_starter


def main() -> None:
    install()
    if "--exit-with-parent" in sys.argv:
        watch_starter()
    from splitserve.process.owned_folder import sweep

    sweep()
    from splitserve.cli import main as run_command

    try:
        run_command()
    except SystemExit as end:
        leave(end.code)


if __name__ == "__main__":
    main()
