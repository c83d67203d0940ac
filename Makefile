# Everything runs in .venv, which the targets make themselves: a Linux machine with Python >= 3.10 is enough.
# Variables: PYTHON (interpreter that makes .venv), JOBS (parallel test processes), PYTEST_ARGS.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo $$python; break; fi; done)
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_DB ?= demo.db
# Without a GPU the host backend interprets the kernels, which needs Triton >= 3.9; and a torch that is already there
# keeps pip from fetching one built for a newer CUDA.
CPU_ONLY := $(shell if ! command -v nvidia-smi >/dev/null 2>&1 && ! test -e /dev/nvidia0; then echo yes; fi)
CPU_PACKAGES := "torch==2.13.0" "triton>=3.9"
# Compile checks run under this one too; the same as the lower bound in pyproject.toml.
OLDEST_TRITON := 3.6.0
OLDEST := .venv-oldest-triton
CLEAN := .venv-wheel
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is imported is compiled then; all of torch would take half a minute.
INSTALL := $(PIP) install --quiet --no-compile

# Where `make engines` keeps Python files of vLLM and SGLang, which tests/multirank/test_engine_packages.py imports.
export ENGINES ?= /tmp/tunedcomm-engines
ENGINE_VERSIONS := vllm==0.33.0 vllm==0.28.0 sglang==0.5.23 sglang==0.5.18

.PHONY: help demo test test-all test-torch lint docs figures build wheel-check clean oldest-triton engines

help:
	@echo "make demo   install, tune all_reduce on this machine, show what was won and why, and check the sums"
	@echo "make test   run the tests but the slow ones (PYTEST_ARGS='-k name' for some of them)"
	@echo "make test-all  run all tests, as CI does; with TUNEDCOMM_TEST_FULL=1 all cases of the sampled ones"
	@echo "make test-torch TORCH=2.14.1  the tests that touch torch's internals, under that torch in .venv-torch-2.14.1"
	@echo "make lint   ruff, mypy, import contracts, spelling"
	@echo "make oldest-triton  the Triton that 'make test-all' compiles with besides the installed one, in $(OLDEST)"
	@echo "make engines  fetch vLLM and SGLang (700 MB) and keep their Python files in $(ENGINES), for the tests of engines"
	@echo "make docs   the pages as a site in build/docs; warnings are errors"
	@echo "make figures  the generated parts of the pages and the plot: reference from the code, tables from bench/results"
	@echo "make build  wheel and source distribution in dist/"
	@echo "make wheel-check  install that wheel alone into a fresh environment, and try it there"
	@echo "make clean  remove .venv, caches and what the demo wrote"

$(VENV)/.installed-demo: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 found; install one or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; install python3-venv or run make PYTHON=/path/to/python3" >&2; exit 1; }
	$(if $(CPU_ONLY),$(INSTALL) $(CPU_PACKAGES))
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-demo
	$(INSTALL) --editable ".[test,report,dashboard]"
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(INSTALL) --editable ".[test,report,dashboard,lint]"
	@touch $@

$(OLDEST)/.installed-$(OLDEST_TRITON): | $(VENV)/.installed
	rm -rf $(OLDEST)
	$(INSTALL) --no-deps --target $(OLDEST) "triton==$(OLDEST_TRITON)"
	@touch $@

oldest-triton: $(OLDEST)/.installed-$(OLDEST_TRITON)

engines: $(VENV)/.installed
	for version in $(ENGINE_VERSIONS); do $(BIN)/python tests/engine_packages.py $$version || exit 1; done

demo: $(VENV)/.installed-demo
	$(BIN)/tunedcomm demo --db $(DEMO_DB)

# By file: tests of one file share what their ranks have found out. In the files' order: those of many ranks, which take
# minutes each, begin first, and no processor waits for one of them in the end.
BY_FILE := --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(BIN)/python -m pytest tests -n $(JOBS) $(BY_FILE) -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.installed oldest-triton
	TUNEDCOMM_REQUIRE_OLDEST_TRITON=1 \
		$(BIN)/python -m pytest tests -n $(JOBS) $(BY_FILE) $(PYTEST_ARGS)

# Registration, interception, FSDP, compilation, symmetric memory, launching and the interpreter. The environment holds the
# torch of the package index with its CUDA libraries and its own Triton, some 5 GB. Without a GPU kernels are interpreted,
# which needs a newer Triton than torch 2.11 brings.
TORCH ?= 2.14.1
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_TESTS := tests/unit/test_integrations.py tests/unit/test_operator_schemas.py tests/unit/test_fast_call.py \
	tests/unit/test_symm.py tests/unit/test_launch.py $(addprefix tests/multirank/test_, operators.py autograd.py \
	intercept.py asynchronous.py fast_calls.py fusion.py fusion_policy.py models.py programs.py serving.py variants.py)

$(TORCH_VENV)/.installed:
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile "torch==$(TORCH)" --editable ".[test]"
	$(if $(CPU_ONLY),$(TORCH_VENV)/bin/python -m pip install --quiet --no-compile --no-deps "triton>=3.8")
	@touch $@

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest $(TORCH_TESTS) -n $(JOBS) $(BY_FILE) $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell .

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --editable ".[test,report,dashboard,docs]"
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

figures: $(VENV)/.installed
	$(BIN)/python docs/generate.py

build: $(VENV)/.installed-lint
	rm -rf dist
	$(BIN)/python -m build

# Nothing of the source tree and nothing of the tests' packages: what a user gets who installs the wheel.
wheel-check: build
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)
	$(if $(CPU_ONLY),$(CLEAN)/bin/python -m pip --disable-pip-version-check install --quiet $(CPU_PACKAGES))
	$(CLEAN)/bin/python -m pip --disable-pip-version-check install --quiet dist/*.whl
	cd $(CLEAN) && env -u PYTHONPATH bin/python $(CURDIR)/tests/try_wheel.py
	rm -rf $(CLEAN)

clean:
	rm -rf $(VENV) $(OLDEST) .venv-torch-* $(CLEAN) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis $(DEMO_DB)*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
