# `make help` lists what a person runs. Everything is made below .venv, .venvs and .cache, and only when what it comes from changed.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
REQUIREMENTS := tests/requirements
# Pins of everything below the direct requirements, for the Python versions that have such files. The two engines ask for
# other versions of the same packages, so SGLang has a file of its own.
PY := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
CONSTRAINTS := $(wildcard $(REQUIREMENTS)/constraints-$(PY).txt)
SGLANG_CONSTRAINTS := $(wildcard $(REQUIREMENTS)/constraints-sglang-$(PY).txt)
PIP_INSTALL = -m pip install -q --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

PACKAGES := mooncake_connector store_client transfer vllm_plugin sglang_backend
# Folders are listed as well: their time changes when a file is deleted.
SOURCES := $(shell find $(PACKAGES) -name __pycache__ -prune -o \( -type d -o -type f \) -print) pyproject.toml README.md LICENSE

DEV := .venv
VLLM := .venvs/vllm
SGLANG := .venvs/sglang
VLLM_NEXT := .cache/vllm-0.33
TRITON := .cache/triton-3.6
NEW_PYTHON := .venvs/python-3.12
LOWEST := .venvs/lowest
PEER_ENV := .venvs/peers
ROUTERS := .venvs/routers
BUILT := .cache/wheel/.built
PANELS := .cache/panels/page.js

.PHONY: bench-store bench-hicache bench-transfer bench-tiers bench-pd bench-pd-sglang bench-routing bench-index bench-eviction
.PHONY: bench-hybrid bench-watched bench-serve bench-unnamed
.PHONY: help setup dev vllm vllm-next triton pythons sglang routers panels models system-packages wheel demo demo-pd demo-engines test test-fast test-long test-gpu test-rdma bench lint clean

help:
	@echo 'make setup         .venv (command line and tools), .venvs/vllm and .venvs/sglang (the engines), with the built wheel in all'
	@echo 'make demo          a prompt asked before and after a restart of a real vLLM server (3 to 8 minutes with all installs)'
	@echo 'make demo-pd       one file: vLLM prefills in one instance and decodes in another (3 to 8 minutes with all installs)'
	@echo 'make demo-engines  SGLang answers from what vLLM computed (SGLang is 10 GB; about 10 minutes with all installs)'
	@echo 'make test-fast     quick tests that need no engine and no tier (about 2 minutes on 2 cores)'
	@echo 'make test-gpu      what only a GPU can show: copies, the cuda_ipc transport, and how fast they are (minutes)'
	@echo 'make test-rdma     all tests of the transport rdma, in an emulated machine with RDMA cards (qemu; about 10 minutes on a quiet core)'
	@echo 'make test          lint, every test, two of the demos (40 to 50 minutes on 2 cores, installs not included)'
	@echo 'make test-long     the tests that have a long form, in it: thousands of kills, a quarter of an hour of load (hours)'
	@echo 'make bench         NAME=store|hicache|transfer|transports|tiers|pd|pd-sglang|routing|index|eviction|hybrid|watched|serve PEERS="..." JSON=FILE: figures and goals (docs/benchmarks.md)'
	@echo 'make lint          ruff and mypy'
	@echo 'make wheel         the wheel, in .cache/wheel'
	@echo 'make clean         remove everything that was made'

setup: dev vllm vllm-next triton pythons sglang routers panels
dev: system-packages $(DEV)/.tools $(DEV)/.mooncake $(DEV)/.nixl $(DEV)/.s3 $(DEV)/.wheel
vllm: system-packages $(VLLM)/.engine $(VLLM)/.tests $(VLLM)/.wheel .cache/models/.made
vllm-next: $(VLLM_NEXT)/.made
triton: $(TRITON)/.made
pythons: $(NEW_PYTHON)/.made $(LOWEST)/.made
sglang: system-packages $(SGLANG)/.engine $(SGLANG)/.tests $(SGLANG)/.mooncake $(SGLANG)/.wheel
routers: $(ROUTERS)/.installed
panels: $(PANELS)
wheel: $(BUILT)
models: .cache/models/.made

demo: vllm
	@PYTHONPATH=tests $(VLLM)/bin/python tests/e2e/demo.py

demo-pd: vllm
	@PYTHONPATH=tests $(VLLM)/bin/python tests/e2e/demo_pd.py

demo-engines: vllm sglang
	@PYTHONPATH=tests $(VLLM)/bin/python tests/e2e/demo_engines.py

test: setup
	@tests/tools/system_packages.sh $(REQUIREMENTS)/rdma-system.txt
	@$(DEV)/bin/python tests/tools/run.py e2e pd slow vllm sglang-pd e2e-sglang transfer rdma store tiers sglang vllm-0.33 triton-3.6 gpu-stand-in python-3.12 lowest lint

test-fast: system-packages $(DEV)/.tools $(DEV)/.wheel
	@$(DEV)/bin/python tests/tools/run.py transfer store

test-long: setup
	@MOONCAKE_TEST_LONG=1 $(DEV)/bin/python tests/tools/run.py long

test-gpu: $(SGLANG)/.tests $(SGLANG)/.wheel
	@$(SGLANG)/bin/pytest -v tests/gpu

# NAME=store PEERS=mooncake; hicache, mooncake and file; transfer, mooncake and nixl; tiers, mooncake; pd, nixl; pd-sglang, mooncake;
# serve, vLLM's connectors.
BENCH_PYTHON := $(DEV)/bin/python
bench-store bench-transfer bench-transports bench-index bench-eviction: dev
bench-tiers: dev vllm
bench-tiers: BENCH_OPTIONS := --vllm-python $(VLLM)/bin/python --model .cache/models/qwen3
bench-hicache: sglang
bench-hicache: BENCH_PYTHON := $(SGLANG)/bin/python
bench-pd: dev vllm
bench-pd: BENCH_OPTIONS := --vllm-python $(VLLM)/bin/python --model .cache/models/qwen3
bench-pd-sglang: dev sglang .cache/models/.made
bench-pd-sglang: BENCH_OPTIONS := --sglang-python $(SGLANG)/bin/python --model .cache/models/qwen3
bench-routing: dev vllm
bench-routing: BENCH_OPTIONS := --vllm-python $(VLLM)/bin/python --model .cache/models/qwen3
bench-hybrid: dev vllm
bench-hybrid: BENCH_OPTIONS := --vllm-python $(VLLM)/bin/python --model .cache/models
bench-watched: dev vllm
bench-watched: BENCH_OPTIONS := --vllm-python $(VLLM)/bin/python --model .cache/models/qwen3
bench-serve: vllm $(PEER_ENV)/.installed
bench-serve: BENCH_PYTHON := $(PEER_ENV)/bin/python
bench-serve: BENCH_OPTIONS := --model .cache/models/qwen3 --dtype float32 --plot docs/images/serve.png
bench-store bench-hicache bench-transfer bench-transports bench-tiers bench-pd bench-pd-sglang bench-routing bench-index bench-eviction \
  bench-hybrid bench-watched bench-serve: $(if $(filter nixl,$(PEERS)),$(DEV)/.nixl)
	@PYTHONPATH=tests $(BENCH_PYTHON) -m bench.peers $(@:bench-%=%) $(BENCH_OPTIONS) $(addprefix --peer ,$(PEERS)) \
		$(if $(JSON),--json $(JSON)) $(ARGS)

bench: bench-$(or $(NAME),unnamed)
bench-unnamed:
	@echo 'name one: make bench NAME=store, hicache, transfer, transports, tiers, pd, pd-sglang, routing, index, eviction, hybrid, watched or serve' >&2; exit 2

test-rdma: system-packages dev $(VLLM)/.engine
	@tests/tools/system_packages.sh $(REQUIREMENTS)/rdma-system.txt
	@MOONCAKE_TEST_RDMA=1 $(DEV)/bin/python tests/tools/run.py rdma

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

# Where they cannot be had there is no stamp, so that the next call tries again.
$(DEV)/.mooncake $(SGLANG)/.mooncake: %/.mooncake: $(REQUIREMENTS)/mooncake.txt | %/bin/python
	@if $*/bin/python $(PIP_INSTALL) -r $<; then touch $@; \
		else echo 'NOT INSTALLED: Mooncake; tests of the tier and the transport `mooncake` and its comparisons in `make bench` will be missing' >&2; fi

$(DEV)/.s3: $(REQUIREMENTS)/s3.txt | $(DEV)/bin/python
	@if $(DEV)/bin/python $(PIP_INSTALL) --no-deps -r $<; then touch $@; \
		else echo 'NOT INSTALLED: S3 servers; the tests of the tier `object` will be skipped' >&2; fi

$(DEV)/.nixl: $(REQUIREMENTS)/nixl.txt | $(DEV)/bin/python
	@if $(DEV)/bin/python $(PIP_INSTALL) --no-deps -r $<; then touch $@; \
		else echo 'NOT INSTALLED: NIXL; the tests of the transport `nixl` will be skipped, its comparisons in `make bench` missing' >&2; fi

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

# Where the wheel cannot be had there is no stamp, so that the next call tries again.
$(VLLM_NEXT)/.made: $(REQUIREMENTS)/vllm-next.txt tests/tools/install_vllm_next.sh $(VLLM)/.engine
	@tests/tools/install_vllm_next.sh $(VLLM)/bin/python $< $(@D)

# What a GPU's torch 2.11 has: older than that of the engines here. Where the wheel cannot be had there is no stamp.
$(TRITON)/.made: $(REQUIREMENTS)/triton.txt $(VLLM)/.engine
	@rm -rf $(@D)
	@if $(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps --target $(@D) -r $<; then touch $@; \
		else echo 'NOT INSTALLED: Triton 3.6; kernels will be compiled with newer versions alone' >&2; fi

# What is installed in engines' images, and what `pyproject.toml` declares. Where no such Python is there is no stamp.
$(NEW_PYTHON)/.made: $(REQUIREMENTS)/pythons.txt $(CONSTRAINTS) tests/tools/install_python.sh $(BUILT)
	@tests/tools/install_python.sh 3.12 $< $(@D) .cache/wheel/*.whl $(addprefix -c ,$(CONSTRAINTS))

$(LOWEST)/.made: $(REQUIREMENTS)/pythons.txt tests/tools/install_python.sh $(BUILT)
	@tests/tools/install_python.sh --lowest 3.10 $< $(@D) .cache/wheel/*.whl

# vLLM's environment seen through another one, which has what only the comparison needs, LMCache's older numpy included.
$(PEER_ENV)/.installed: $(REQUIREMENTS)/peers.txt | $(VLLM)/.engine
	@echo 'installing LMCache and the Mooncake Store into $(PEER_ENV) (some minutes)'
	@$(PYTHON) -m venv $(PEER_ENV)
	@$(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEER_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth"
	@$(PEER_ENV)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

$(SGLANG)/bin/python:
	$(PYTHON) -m venv $(SGLANG)

$(addprefix $(SGLANG)/.,engine tests mooncake wheel) $(ROUTERS)/.installed: private CONSTRAINTS := $(SGLANG_CONSTRAINTS)

$(SGLANG)/.engine: $(REQUIREMENTS)/sglang.txt $(SGLANG_CONSTRAINTS) | $(SGLANG)/bin/python
	@echo 'installing SGLang (10 GB, some minutes)'
	@$(SGLANG)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(SGLANG)/.tests: $(REQUIREMENTS)/sglang-test.txt $(SGLANG_CONSTRAINTS) | $(SGLANG)/.engine
	@$(SGLANG)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

# Where it cannot be had there is no stamp, so that the next call tries again.
$(ROUTERS)/.installed: $(REQUIREMENTS)/routers.txt $(SGLANG_CONSTRAINTS)
	@$(PYTHON) -m venv $(ROUTERS)
	@if $(ROUTERS)/bin/python $(PIP_INSTALL) -r $<; then touch $@; \
		else echo 'NOT INSTALLED: sglang-router and vllm-router; what is tested behind it will be skipped' >&2; fi

# Where npm or its packages cannot be had there is no page, so that the next call tries again.
$(PANELS): tests/tools/build_panels.sh $(wildcard tests/dashboards/render/*)
	@echo 'building the page that draws the panels of the dashboard, of components of Grafana (a minute)'
	@mkdir -p $(@D)
	@$< $@ || echo 'NOT INSTALLED: components of Grafana; the panels of the dashboard will not be drawn' >&2

# The same version is built again and again: the first call brings its code, the second what it depends on.
$(DEV)/.wheel $(VLLM)/.wheel $(SGLANG)/.wheel: %/.wheel: $(BUILT)
	@$*/bin/python $(PIP_INSTALL) --no-deps --force-reinstall .cache/wheel/*.whl
	@$*/bin/python $(PIP_INSTALL) .cache/wheel/*.whl
	@touch $@
$(DEV)/.wheel: | $(DEV)/.tools
$(VLLM)/.wheel: | $(VLLM)/.engine
$(SGLANG)/.wheel $(SGLANG)/.mooncake: | $(SGLANG)/.engine

.cache/models/.made: $(wildcard tests/models/*.py) $(REQUIREMENTS)/models.txt | $(VLLM)/.tests
	@echo 'making the checkpoints in .cache/models'
	@rm -rf .cache/models
	@TQDM_DISABLE=1 PYTHONPATH=tests $(VLLM)/bin/python -m models
	@touch $@
