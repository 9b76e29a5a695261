"""An engine around a scheduler process without a model: every way of asking, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import tokenizers
from safetensors.numpy import save_file

import splitserve
from splitserve import BatchError, Engine
from splitserve.core.errors import ModelLoadError, WorkerUnavailableError
from splitserve.ranks import processes
from support.fake_scheduler import CRASH, DIE_TOKEN, HANG_TOKEN, LOAD_FOREVER, READY, REFUSE

pytestmark = pytest.mark.process

DEADLINE = 60.0
THREE = {"max_new_tokens": 3}
HANGS = f"w{HANG_TOKEN}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a front end reads of a model: its config and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {f"w{i}": i for i in range(16)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 15}')
    save_file({}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    yield
    wait_for(lambda: not set(psutil.Process().children(recursive=True)) - children, "a process is left")
    wait_for(lambda: not set(threading.enumerate()) - threads, "a thread is left")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def choose(name: str) -> None:
        command = (sys.executable, "-m", "support.fake_scheduler", name)
        monkeypatch.setattr(processes, "SCHEDULER_COMMAND", command)

    choose(READY)
    return choose


@pytest.fixture
def engine(model: str, scenario: Callable[[str], None]) -> Iterator[Engine]:
    with Engine(model) as engine:
        yield engine


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Python ignores SIGINT where its parent did: what a shell starts in the background, a CI runner's job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_busy(engine: Engine) -> bool:
    return engine._backend._front.requests.num_open_samples > 0


def test_one_prompt_has_one_answer_and_a_list_has_a_list(engine):
    output = engine.generate("w5", THREE)
    assert (output.text, output.token_ids, output.finish_reason) == (" w5 w5 w5", (5, 5, 5), "length")
    assert [o.token_ids for o in engine.generate(["w5", [6], "w7 w8"], THREE)] == [(5,) * 3, (6,) * 3, (7,) * 3]
    assert engine.generate([]) == []


def test_a_stream_ends_with_the_answer(engine):
    chunks = list(engine.stream(["w5", "w6"], THREE))
    assert {c.index: c.output.token_ids for c in chunks if c.output} == {0: (5, 5, 5), 1: (6, 6, 6)}


async def test_coroutines_get_the_same_from_a_loop_of_their_own(engine):
    outputs = await asyncio.gather(*(engine.agenerate(f"w{i}", THREE) for i in range(3, 9)))
    assert [o.token_ids[0] for o in outputs] == [3, 4, 5, 6, 7, 8]
    async with aclosing(engine.astream("w5", THREE)) as chunks:
        assert [c.output.text async for c in chunks if c.output] == [" w5 w5 w5"]


def test_one_failure_does_not_lose_the_others(engine):
    with pytest.raises(BatchError, match=r"1 of 3 prompts failed .*temperature is -1") as caught:
        engine.generate(["w5", "w6", "w7"], [THREE, {"temperature": -1.0}, THREE])
    assert [o and o.token_ids[0] for o in caught.value.outputs] == [5, None, 7]


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_aborts_what_runs_and_the_engine_goes_on(engine):
    def interrupt() -> None:
        wait_for(lambda: is_busy(engine), "nothing runs")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([HANGS, "w5"])
    thread.join()
    assert not is_busy(engine)
    assert engine.generate("w5", THREE).text == " w5 w5 w5"


def test_a_stream_that_is_dropped_aborts_the_rest(engine):
    for chunk in engine.stream([HANGS, "w5"], THREE):
        assert is_busy(engine) or chunk.output
        if chunk.index == 0:
            break
    wait_for(lambda: not is_busy(engine), "it still runs")


async def test_a_cancelled_coroutine_aborts_what_it_asked_for(engine):
    chunks = engine.astream(HANGS)
    assert (await anext(chunks)).text == f" {HANGS}"
    waiting = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    assert is_busy(engine)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not is_busy(engine)


def test_closing_ends_what_other_threads_wait_for(model, scenario):
    errors = []

    def ask() -> None:
        try:
            engine.generate([HANGS, HANGS])
        except WorkerUnavailableError as error:
            errors.append(error)

    with Engine(model) as engine:
        half = engine.stream(HANGS)
        next(half)
        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: engine._backend._front.requests.num_open_samples == 3, "they do not run")
    thread.join(DEADLINE)
    assert [e.message for e in errors] == ["this engine is closed, and whatever it ran was aborted: open another"]
    with pytest.raises(WorkerUnavailableError, match="closed"):
        next(half)
    with pytest.raises(WorkerUnavailableError, match="closed"):
        engine.generate("w5")
    engine.close()


def test_two_engines_stand_side_by_side(model, engine):
    with Engine(model) as other:
        assert other.generate("w6", THREE).text == " w6 w6 w6"
        assert engine.generate("w5", THREE).text == " w5 w5 w5"
    assert engine.generate("w5", THREE).text == " w5 w5 w5"


def test_the_death_of_the_scheduler_is_the_error_of_what_runs_and_of_what_comes(engine):
    for prompt in (f"w{DIE_TOKEN}", "w5"):
        with pytest.raises(WorkerUnavailableError, match=r"scheduler.*ended with code 7"):
            engine.generate(prompt, deadline=DEADLINE)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [(REFUSE, ModelLoadError, "the model does not fit"), (CRASH, WorkerUnavailableError, "ended with code 7")],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(model, scenario, name, kind, told):
    scenario(name)
    with pytest.raises(kind, match=told):
        Engine(model)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_it_loads_leaves_nothing(model, scenario):
    scenario(LOAD_FOREVER)
    # Of other tests: a fork server lives as long as the tests do.
    others = set(psutil.Process().children())

    def interrupt() -> None:
        wait_for(lambda: bool(set(psutil.Process().children()) - others), "nothing starts")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Engine(model)
    thread.join()


def test_a_program_that_forgets_to_close_ends_all_the_same(model, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, splitserve\n"
        "from splitserve.ranks import processes\n"
        "processes.SCHEDULER_COMMAND = (sys.executable, '-m', 'support.fake_scheduler', 'ready')\n"
        f"engine = splitserve.Engine({model!r})\n"
        "print(engine.generate('w5', {'max_new_tokens': 1}).text, engine._backend._front.scheduler_pids[0])\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text, pid = done.stdout.split()
    assert text == "w5"
    assert not psutil.pid_exists(int(pid))


def test_importing_the_package_loads_nothing_and_the_engine_no_torch():
    code = (
        "import sys, splitserve\n"
        "heavy = {'zmq', 'pydantic', 'httpx', 'fastapi', 'torch', 'numpy'}\n"
        "assert not {m.split('.')[0] for m in sys.modules} & heavy\n"
        "from splitserve import Engine\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(splitserve.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE, env=env)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = splitserve.Engin
