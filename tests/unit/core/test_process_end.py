"""How processes end. Each case is a process of its own, which prints a line at the point where a signal has to hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEADLINE = 60.0
HEAD = """
import signal, sys, threading
from splitserve.process import process_end
def reached(name):
    print(name, flush=True)
def wait():
    threading.Event().wait(60)
"""


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `code`, and has printed its first line."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "here\n"
            yield child
        finally:
            child.kill()


def after_signals(code: str, *numbers: signal.Signals) -> tuple[int, str, str]:
    """Exit code, the rest of the output, and the errors."""
    with process(code) as child:
        for number in numbers:
            child.send_signal(number)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.close()
        # Not by `communicate`: what came with the first line is buffered already.
        out, err = child.stdout.read(), child.stderr.read()
        return child.wait(DEADLINE), out, err


ENDS = [
    (signal.SIGINT, 130, "interrupted: this process has ended\n"),
    (signal.SIGTERM, 143, "terminated: this process has ended\n"),
]


@pytest.mark.parametrize(("number", "code", "line"), ENDS)
def test_a_process_that_owns_nothing_ends_at_once_with_one_line(number, code, line):
    assert after_signals("process_end.install(); reached('here'); wait()", number) == (code, "", line)


def test_the_line_has_the_name_of_the_process():
    code = "process_end.install('splitserve serve'); process_end.install(); reached('here'); wait()"
    assert after_signals(code, signal.SIGINT)[2] == "interrupted: splitserve serve has ended\n"


@pytest.mark.parametrize(("number", "code", "line"), ENDS)
def test_a_signal_during_an_import_leaves_no_traceback(number, code, line):
    found = after_signals(
        """
        import sys, types
        process_end.install()
        class Finder:
            def find_spec(self, *_):
                reached("here")
                try:
                    wait()
                except BaseException as error:
                    raise ImportError("half imported") from error
        sys.meta_path.insert(0, Finder())
        import missing
        """,
        number,
    )
    assert found == (code, "", line)


@pytest.mark.parametrize(("number", "code", "line"), ENDS)
def test_what_is_owned_is_released_in_order(number, code, line):
    found = after_signals(
        """
        process_end.install()
        try:
            with process_end.unwinding():
                try:
                    with process_end.unwinding():
                        reached("here")
                        wait()
                finally:
                    reached("released")
        except KeyboardInterrupt:
            sys.exit(130)
        """,
        number,
    )
    assert found == (code, "released\n", line)


def test_a_second_signal_does_not_interrupt_the_release():
    found = after_signals(
        """
        process_end.install()
        with process_end.unwinding():
            try:
                reached("here")
                wait()
            finally:
                with process_end.deferred():
                    signal.raise_signal(signal.SIGTERM)
                    signal.raise_signal(signal.SIGINT)
                    reached("released")
        """,
        signal.SIGTERM,
    )
    assert found[1] == "released\n"


def test_asyncio_cancels_its_main_task_at_an_interrupt():
    code, out, _ = after_signals(
        """
        import asyncio
        process_end.install()
        async def main():
            try:
                reached("here")
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                reached("cancelled")
                raise
        try:
            with process_end.unwinding():
                asyncio.run(main())
        except KeyboardInterrupt:
            sys.exit(130)
        """,
        signal.SIGINT,
    )
    assert (code, out) == (130, "cancelled\n")


def test_deferred_signals_arrive_when_the_block_ends():
    found = after_signals(
        """
        process_end.install()
        with process_end.deferred(), process_end.deferred():
            reached("here")
            sys.stdin.readline()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            reached("finished")
        reached("too far")
        """,
    )
    assert found == (143, "finished\n", "terminated: this process has ended\n")


def test_a_program_with_handlers_of_its_own_keeps_them():
    found = after_signals(
        """
        signal.signal(signal.SIGINT, lambda *_: reached("own"))
        with process_end.unwinding():
            reached("here")
            signal.raise_signal(signal.SIGINT)
        with process_end.deferred():
            signal.raise_signal(signal.SIGINT)
            reached("first")
        """
    )
    assert found == (0, "own\nfirst\nown\n", "")


def test_a_process_ends_with_its_starter():
    with process("process_end.watch_starter(); reached('here'); wait()") as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE) == 1


def test_what_the_process_does_last_has_bounded_time():
    with process(
        """
        process_end.watch_starter()
        process_end.watch_starter(lambda: reached("ended"), grace=0.01)
        reached("here")
        wait()
        """
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        assert child.stdout.read() == "ended\n"
        assert child.wait(DEADLINE) == 1


@pytest.mark.parametrize(("code", "expected"), [("3", 3), ("None", 0), ("'wrong'", 1)])
def test_leaving_runs_exit_handlers_and_no_teardown(code, expected):
    found = after_signals(
        f"""
        import atexit
        class Module:
            def __del__(self):
                reached("torn down")
        kept = Module()
        atexit.register(reached, "exit handler")
        reached("here")
        sys.stdout.write("buffered\\n")
        process_end.leave({code})
        """
    )
    assert found == (expected, "buffered\nexit handler\n", "wrong\n" if expected == 1 else "")


# Its starter ends while the first call of `tempfile.gettempdir` has its probe file. A thread that watches the starter
# would end the process now.
_STARTER_ENDS_DURING_THE_PROBE = """
import os, sys, threading
from splitserve.__main__ import main

reader, writer = os.pipe()
os.dup2(reader, 0)
remove = os.unlink

def unlink(path, **options):
    global writer
    if writer is not None:
        os.close(writer)
        writer = None
        for thread in threading.enumerate():
            if thread.name == "starter-watch":
                thread.join()
    remove(path, **options)

os.unlink = unlink
sys.argv = ["splitserve", "--exit-with-parent", "--version"]
main()
"""


def test_the_end_of_the_starter_leaves_no_probe_file(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _STARTER_ENDS_DURING_THE_PROBE], env=env, timeout=60)
    assert list(tmp_path.iterdir()) == []


# As if neither TMPDIR nor any of the usual folders could be written to.
_NO_TEMPORARY_FOLDER = """
import sys, tempfile
from splitserve.__main__ import main

tempfile._candidate_tempdir_list = lambda: ["/dev/null/one", "/dev/null/two"]
sys.argv = ["splitserve", "--version"]
main()
"""


def test_a_command_without_a_temporary_folder_ends_with_one_line():
    command = [sys.executable, "-c", _NO_TEMPORARY_FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    problem = "error: No usable temporary directory found in ['/dev/null/one', '/dev/null/two']. Free some space, "
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{problem}or set TMPDIR to a folder that can be written to.\n"
