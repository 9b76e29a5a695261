"""Entry point of `splitserve` and `python -m splitserve`. Installs signal handlers before the slow imports."""

import sys
import tempfile

from splitserve.process.process_end import deferred, install, leave, watch_starter

# Groups of commands: the next word is part of the name.
_GROUPS = (["bench"], ["certs"], ["cluster"])


def main() -> None:
    num_words = 2 if sys.argv[1:2] in _GROUPS else 1
    install(" ".join(["splitserve", *sys.argv[1 : 1 + num_words]]))
    try:
        with deferred():
            # The first call writes a probe file and removes it. No signal and no end of the starter may come between.
            tempfile.gettempdir()
    except OSError as error:
        leave(f"error: {error.strerror}. Free some space, or set TMPDIR to a folder that can be written to.")
    if "--exit-with-parent" in sys.argv:
        watch_starter()
    from splitserve.process.engine_start import give_head_start

    give_head_start(sys.argv[1:])
    from splitserve.process.owned_folder import sweep

    sweep()
    from splitserve.cli import main as run_command

    try:
        run_command()
    except SystemExit as end:
        leave(end.code)


if __name__ == "__main__":
    main()
