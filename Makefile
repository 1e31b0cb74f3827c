# make demo   trains on two processes of this machine      make demo DATASET=Computers   on a real graph
# make test   runs the whole suite, two files at a time    make lint / make format       one hook run
# make docs   writes the pages of docs/ to build/site
#
# Needs Python >= 3.10 and a C++ compiler. Everything goes into .venv; nvcc on PATH adds the CUDA kernels.
# To train on GPUs, or to try another torch, say which:    make test TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
DATASET ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
NATIVE := pyproject.toml $(shell find csrc -type f)

.PHONY: demo test lint format docs install clean FORCE

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(if $(DATASET),--dataset "$(DATASET)")

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

# The hooks change what they can put right, and then fail: look at the difference, and run them again.
lint: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

format: $(VENV)/.installed
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict

install: $(VENV)/.installed

# Torch first and by its own line: the package would take the newest, and is built against the one in place.
$(VENV)/.tools:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"expected Python >= 3.10, got {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install 'scikit-build-core>=0.11' cmake ninja
	touch $@

# An install in place knows which module lies in which file, so it is made anew when the list of files changes.
$(VENV)/.modules: $(VENV)/.tools FORCE
	@find lightning_sylvie -name '*.py' | LC_ALL=C sort >$@.new
	@if cmp -s $@ $@.new; then rm $@.new; else mv $@.new $@; fi

# Python sources are used where they lie. The C++ is compiled here, and again when it has changed: never at
# import, where every process of a training run would do it.
$(VENV)/.installed: $(VENV)/.tools $(VENV)/.modules $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis lightning_logs
