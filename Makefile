# Everything runs inside .venv, which `setup` makes; nothing outside the repository and ~/.cache/splitserve is touched,
# but that `test`, where it is root on Debian, installs system libraries that are missing (`system-packages`).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The CPU build where the package index offers one. For CUDA put your own requirement here, e.g. TORCH=torch==2.11.0.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: help setup missing-packages system-packages demo test check walk bench performance soak chaos docs site page-images case-images bench-page format clean

help:
	@echo "make demo    set everything up, then serve one chat with prefill and decode in separate processes"
	@echo "make test    all tests            make check   ruff, mypy, shape of the code"
	@echo "make bench   figures, half an hour make soak    the long random test"
	@echo "make performance  the figures and plots of docs/performance.md"
	@echo "make walk    files and functions of one chat request, by process"
	@echo "make chaos   16 minutes of workers that die under load"
	@echo "make bench-page  frame times of the web page"
	@echo "make docs    new pictures of the web page, and the documentation as a site, in build/site"
	@echo "make setup   only the set-up      make clean   remove the set-up"

setup: .venv/.installed
	@folder="$$($(BIN)/splitserve pull smollm2)" && echo "Model: $$folder"

.venv/.installed: requirements.lock pyproject.toml setup.py $(wildcard src/splitserve/_native/*.[ch])
	@echo "Setting up .venv (first time: a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	@echo "Compiling the kernels in C on all cores: about 5 minutes on two, without output until they are done"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# xgrammar wants triton, which is for GPUs only and comes with torch's builds for them.
	@problems="$$($(BIN)/python -m pip check | grep -v -e '^No broken' -e '^xgrammar .* requires triton,')"; \
	  test -z "$$problems" || { echo "$$problems"; exit 1; }
	@touch $@

# What the libraries of transfer backends link to, for the tests; each as file:package.
SYSTEM_LIBRARIES := libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4
# Programs that tests run, each as program:package. The first is the browser for the web page.
SYSTEM_PROGRAMS := chromium:chromium prometheus:prometheus

missing-packages:
	@for entry in $(SYSTEM_LIBRARIES); do \
	  $(PYTHON) -c "import ctypes; ctypes.CDLL('$${entry%%:*}')" 2>/dev/null || printf ' %s' "$${entry##*:}"; \
	done; \
	for entry in $(SYSTEM_PROGRAMS); do command -v "$${entry%%:*}" >/dev/null || printf ' %s' "$${entry##*:}"; done

system-packages:
	@missing="$$($(MAKE) --silent --no-print-directory missing-packages)"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing$$missing"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing \
	    || echo "Could not install$$missing: tests that need them are skipped"; \
	else \
	  echo "Missing Debian packages:$$missing. Tests that need them are skipped; as root: make system-packages"; \
	fi

demo: setup
	@$(BIN)/splitserve demo

test: setup system-packages
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_rooms.py tests/unit/test_shape.py tests/unit/test_vocabulary.py \
	  tests/unit/test_named_files.py

walk: setup
	@$(BIN)/python tests/support/walk/walk.py

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every bench in its short form: about 15 minutes on two cores, once the peers of `compare` are installed.
bench: setup
	@$(BIN)/splitserve bench main --quick --append-to docs/log.md
	@$(BIN)/splitserve bench transfer --quick --append-to docs/log.md
	@$(BIN)/splitserve bench serve --num-prompts 8 --threads $$(nproc) --chunked-prefill-size 512 --chunked-prefill-size 2048 --append-to docs/log.md
	@$(BIN)/splitserve bench compare --quick --timeout 120 --append-to docs/log.md

# The measured parts of one page, written anew where they stand: leave the machine idle.
performance: setup
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['bench'], sep='\n')" \
	  | PIP_REQUIRE_VIRTUALENV=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	@$(BIN)/splitserve bench growth --page docs/performance.md
	@$(BIN)/splitserve bench startup --page docs/performance.md

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

# Tiny models with trained draft heads, and pools so small that requests are retracted.
HEADS := build/draft-heads
SMALL_POOL := --max-total-tokens 1600 --num-reserved-decode-tokens 1

chaos: setup
	@$(BIN)/splitserve chaos --seconds 300 --append-to docs/log.md
	@$(BIN)/splitserve chaos --seconds 120 --prefill 1 --decode 1 --append-to docs/log.md
	@$(BIN)/splitserve chaos --seconds 300 --dtype float32 --append-to docs/log.md --serve-options \
	  "--pp-size 2 --speculative-algorithm ngram --max-total-tokens 800 --num-reserved-decode-tokens 1 \
	  --transfer-option direct=false"
	@PYTHONPATH=tests $(BIN)/python -m support.draft_heads $(HEADS)
	@$(BIN)/splitserve chaos $(HEADS)/eagle3/model --seconds 120 --dtype bfloat16 --append-to docs/log.md --serve-options \
	  "--speculative-algorithm eagle3 --speculative-draft-model $(HEADS)/eagle3/head $(SMALL_POOL)"
	@$(BIN)/splitserve chaos $(HEADS)/mtp/model --seconds 120 --dtype bfloat16 --append-to docs/log.md --serve-options \
	  "--speculative-algorithm mtp $(SMALL_POOL)"

# The pictures need the whole set-up, the site only the extra `docs`. A broken link is an error (but not with --quiet,
# which drops warnings).
docs:
	@if [ -e .venv/.installed ] && command -v chromium >/dev/null; then $(MAKE) --no-print-directory page-images case-images; \
	  else echo "Kept the pictures: new ones need make setup and chromium"; fi
	@$(MAKE) --no-print-directory site

site:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  | PIP_REQUIRE_VIRTUALENV=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# Pictures of docs/page.md; needs chromium.
page-images: setup system-packages
	@PYTHONPATH=tests $(BIN)/python tests/support/take_page_images.py

# Pictures of docs/why-slow.md, with real workers: some minutes on an idle machine; needs chromium.
case-images: setup system-packages
	@PYTHONPATH=tests $(BIN)/python tests/support/take_case_images.py

# Frame times of the web page; needs chromium and an idle machine.
bench-page: setup system-packages
	$(BIN)/python -m pytest -q -s -m soak tests/unit/router/test_page_speed.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
