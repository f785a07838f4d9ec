# demo | test | bench | lint. Each target makes its own .venv and installs all it needs.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
SUM := $(shell cat pyproject.toml $(CONSTRAINTS) | cksum | cut -d' ' -f1)
ALL := $(VENV)/.all-$(SUM)
# The demo needs less than the tests; what is installed already serves it too.
DEMO := $(or $(wildcard $(ALL)),$(VENV)/.demo-$(SUM))

.PHONY: demo test bench lint install servers clean

install: $(ALL)

$(ALL):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[train,hf,dev]'
	@rm -f $(VENV)/.all-* $(VENV)/.demo-*
	@touch $@

$(VENV)/.demo-$(SUM):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[train]'
	@rm -f $(VENV)/.all-* $(VENV)/.demo-*
	@touch $@

# Real Prometheus, Alertmanager and Chromium for the tests that use them. Without the right to
# install packages those tests skip and say so; in CI a skip is a failure.
servers:
	@sh tests/support/install_servers.sh

demo: $(DEMO)
	$(BIN)/ntp-sidecar demo $(DEMO_ARGS)

test: install servers lint
	$(BIN)/python tests/support/run_lanes.py $(TEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
