"""The tokenizer that workers share: for which models and files, and that a fork stays safe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitserve.api.tokenizer import Tokenizer
from splitserve.process.template import ForkRequest, TemplateProcess, is_supported
from splitserve.worker import shared_tokenizer
from splitserve.worker.shared_tokenizer import load_tokenizer, share_tokenizer
from support.tiny_models import tiny_tokenizer


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tokenizer, "_shared", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def make_model(folder: Path) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_worker_takes_the_shared_tokenizer_of_its_model_only(folder: Path, tmp_path: Path) -> None:
    share_tokenizer(str(folder))
    shared = load_tokenizer(folder)
    assert load_tokenizer(folder).backend is shared.backend
    assert shared.encode("a text") == Tokenizer.load(folder).encode("a text")
    other = make_model(tmp_path / "other")
    assert load_tokenizer(other).backend is not shared.backend
    # Sharing it again loads nothing.
    share_tokenizer(str(folder))
    assert load_tokenizer(folder).backend is shared.backend


def test_changed_files_are_loaded_again(folder: Path) -> None:
    share_tokenizer(str(folder))
    shared = load_tokenizer(folder)
    (folder / "generation_config.json").write_text("{}")
    changed = load_tokenizer(folder)
    assert changed.backend is not shared.backend
    share_tokenizer(str(folder))
    assert load_tokenizer(folder).backend is load_tokenizer(folder).backend


def test_what_cannot_be_shared_is_left_to_the_worker(folder: Path, tmp_path: Path) -> None:
    panics = make_model(tmp_path / "panics")
    content = json.loads((panics / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (panics / "tokenizer.json").write_text(json.dumps(content))
    share_tokenizer(str(panics))
    (folder / "tokenizer.json").write_text("{")
    for model in (str(folder), str(tmp_path / "missing"), "owner/missing", "smollm2-q4", "a b/c d", ""):
        share_tokenizer(model)
    assert shared_tokenizer._shared is None
    with pytest.raises(Exception, match=r"EOF|column"):
        load_tokenizer(folder)


def test_a_folder_with_a_link_without_target_is_loaded(folder: Path, tmp_path: Path) -> None:
    share_tokenizer(str(folder))
    other = make_model(tmp_path / "other")
    (other / "link").symlink_to("/nowhere")
    assert load_tokenizer(other).encode("a text") == Tokenizer.load(folder).encode("a text")
    share_tokenizer(str(other))
    assert load_tokenizer(other).backend is not load_tokenizer(folder).backend


PROBE = """
import sys
from splitserve.worker import shared_tokenizer
def main():
    shared = shared_tokenizer._shared
    print(None if shared is None else shared[1].encode("a text").ids, flush=True)
    return len(sys.stdin.read())
"""


@pytest.fixture
def template(tmp_path: Path) -> Iterator[TemplateProcess]:
    (tmp_path / "probe.py").write_text(PROBE)
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])), "TOKENIZERS_PARALLELISM": "false"}
    template = TemplateProcess(["probe"], env)
    yield template
    template.close()


@pytest.mark.process
@pytest.mark.skipif(not is_supported(), reason="needs Linux")
def test_the_template_shares_it_with_one_thread_and_survives_a_bad_model(
    folder: Path, tmp_path: Path, template: TemplateProcess
) -> None:
    printed = []
    for model in (None, str(tmp_path / "missing"), str(folder)):
        reader, writer = os.pipe()
        process = template.fork(
            ForkRequest(module="probe", args=(), env=dict(os.environ), early=None, model=model), writer
        )
        os.close(writer)
        with open(reader) as output:
            assert process is not None
            process.stdin.close()
            assert process.wait(60) == 0
            printed.append(output.read().strip())
    expected = Tokenizer.load(folder).encode("a text")
    assert printed == ["None", "None", str(expected)]
    assert psutil.Process(template.pid).num_threads() == 1
