# `make help` lists what a person runs. Everything is made below .venv, .venvs and .cache, and only when what it comes from changed.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
REQUIREMENTS := tests/requirements
# Pins of everything below the direct requirements, for the Python versions that have such a file.
CONSTRAINTS := $(wildcard $(REQUIREMENTS)/constraints-$(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt)
PIP_INSTALL := -m pip install -q --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

PACKAGES := mooncake_connector store_client vllm_plugin
# Folders are listed as well: their time changes when a file is deleted.
SOURCES := $(shell find $(PACKAGES) -name __pycache__ -prune -o \( -type d -o -type f \) -print) pyproject.toml README.md LICENSE

DEV := .venv
VLLM := .venvs/vllm
BUILT := .cache/wheel/.built

.PHONY: help setup dev vllm models system-packages wheel demo test test-fast lint clean

help:
	@echo 'make setup      .venv (command line and tools) and .venvs/vllm (the engine), with the built wheel in both'
	@echo 'make demo       a prompt asked before and after a restart of a real vLLM server (about 4 minutes with all installs)'
	@echo 'make test-fast  the tests that need no engine (under 2 minutes)'
	@echo 'make test       lint, every test, the demo (about a quarter of an hour on 2 cores)'
	@echo 'make lint       ruff and mypy'
	@echo 'make wheel      the wheel, in .cache/wheel'
	@echo 'make clean      remove everything that was made'

setup: dev vllm
dev: $(DEV)/.tools $(DEV)/.mooncake $(DEV)/.wheel
vllm: system-packages $(VLLM)/.engine $(VLLM)/.tests $(VLLM)/.wheel .cache/models/.made
wheel: $(BUILT)
models: .cache/models/.made

demo: vllm
	@PYTHONPATH=tests $(VLLM)/bin/python tests/e2e/demo.py

test: setup
	@$(DEV)/bin/python tests/tools/run.py lint fast slow vllm e2e

test-fast: $(DEV)/.tools $(DEV)/.wheel
	@$(DEV)/bin/python tests/tools/run.py fast

lint: $(DEV)/.tools $(DEV)/.wheel
	@$(DEV)/bin/python tests/tools/run.py lint

clean:
	rm -rf .venv .venvs .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache

system-packages:
	@tests/tools/system_packages.sh $(REQUIREMENTS)/system.txt

$(DEV)/bin/python:
	$(PYTHON) -m venv $(DEV)

$(DEV)/.tools: $(REQUIREMENTS)/dev.txt $(CONSTRAINTS) | $(DEV)/bin/python
	@echo 'installing the tools into $(DEV)'
	@$(DEV)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(DEV)/.mooncake: $(REQUIREMENTS)/mooncake.txt $(CONSTRAINTS) | $(DEV)/bin/python
	@$(DEV)/bin/python $(PIP_INSTALL) -r $< || echo 'NOT INSTALLED: the Mooncake peer of `bench store`; its comparison will be missing' >&2
	@touch $@

$(BUILT): $(SOURCES) | $(DEV)/.tools
	@rm -rf .cache/wheel
	@$(DEV)/bin/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w .cache/wheel .
	@touch $@

$(VLLM)/bin/python:
	$(PYTHON) -m venv $(VLLM)

$(VLLM)/.engine: $(REQUIREMENTS)/vllm.txt $(CONSTRAINTS) tests/tools/install_vllm.sh | $(VLLM)/bin/python
	@tests/tools/install_vllm.sh $(VLLM)/bin/python $< $(CONSTRAINTS)
	@touch $@

$(VLLM)/.tests: $(REQUIREMENTS)/vllm-test.txt $(CONSTRAINTS) | $(VLLM)/.engine
	@$(VLLM)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

# The same version is built again and again: the first call brings its code, the second what it depends on.
$(DEV)/.wheel $(VLLM)/.wheel: %/.wheel: $(BUILT)
	@$*/bin/python $(PIP_INSTALL) --no-deps --force-reinstall .cache/wheel/*.whl
	@$*/bin/python $(PIP_INSTALL) .cache/wheel/*.whl
	@touch $@
$(DEV)/.wheel: | $(DEV)/.tools
$(VLLM)/.wheel: | $(VLLM)/.engine

.cache/models/.made: $(wildcard tests/models/*.py) $(REQUIREMENTS)/models.txt | $(VLLM)/.tests
	@echo 'making the checkpoints in .cache/models'
	@rm -rf .cache/models
	@TQDM_DISABLE=1 PYTHONPATH=tests $(VLLM)/bin/python -m models
	@touch $@
