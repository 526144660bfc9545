# Needs make and python3.11 with venv and pip. Offline once `make venv` has run.
# PYTHON=... chooses the interpreter that makes .venv; ARGS=... replaces or adds to the arguments of test, serve, bench and load.

PYTHON ?= python3.11
ARGS ?=

BIN := .venv/bin
PROTOS := inference worker cluster replica
GENERATED := $(foreach name,$(PROTOS),$(name)_pb2.py $(name)_pb2.pyi $(name)_pb2_grpc.py)
PROTOC := $(BIN)/python -m grpc_tools.protoc -I src

# The stamp's name says what was installed and where: another lock, or a checkout that was moved, installs again.
STAMP := .venv/.baton-$(shell { cat requirements.lock requirements-nodeps.lock pyproject.toml; pwd; } | cksum | tr ' ' -)

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-browser test-clients test-hosts lint proto bench bench-peers load venv clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: venv ## One prefill and one decode worker on this machine answer a question, then stop.
	@$(BIN)/python -m baton.client.demo

serve: venv ## Serve with cluster.yaml, or with what ARGS says: make serve ARGS="--prefill 1 --decode 2".
	$(BIN)/baton serve $(or $(ARGS),$(wildcard cluster.yaml))

# Those that hold Ray in their process keep it away from those that hold NIXL and event loops of their own.
test: venv ## Run all tests; ARGS goes to pytest instead of that: make test ARGS="-m 'not cluster'".
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -m "not cluster" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m cluster
else
	$(BIN)/python -m pytest $(ARGS)
endif

# Its file is named so that pytest collects it only when it is asked to: other tests need nothing but this Makefile.
test-browser: venv ## Look at the status page with Chromium, which has to be installed.
	$(BIN)/python -m pytest tests/browser/look_at_cluster_page.py $(ARGS)

# Some of them need hundreds of packages, and not the same versions: each has an environment in .venv-clients.
test-clients: venv ## Run the clients of docs/clients.md and 10,000 odd requests; ARGS names some: ARGS="curl fuzz".
	PYTHONPATH=tests $(BIN)/python -m clients.run $(ARGS)

# Hosts out of namespaces: needs root's rights, ssh and rsync, and says so. In this order, as the last takes the cluster down.
HOSTS := $(patsubst %,tests/hosts/check_%.py,bed serving faults membership ending)

test-hosts: venv ## Run ray up with six hosts on this machine, cut and kill them; ARGS goes to pytest: ARGS="-k cut".
	@PYTHONPATH=tests $(BIN)/python -m hosts.bed
	$(BIN)/python -m pytest $(HOSTS) $(ARGS)

lint: venv ## Check style, formatting, types, and that the generated protocol code is up to date.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	$(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTOS:%=baton/proto/%.proto) && \
	for file in $(GENERATED); do \
		cmp -s "proto/$$file" "$$out/baton/proto/$$file" || { echo "proto/$$file is out of date: make proto"; exit 1; }; \
	done

proto: venv ## Regenerate the protocol code in proto/ from its .proto files.
	$(PROTOC) --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS:%=baton/proto/%.proto)

bench: venv ## Measure all that has a bar and print one table; ARGS names some of it: make bench ARGS="S1 S2".
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-peers: venv ## Install what make bench compares with (vLLM, its router) into .venv-peers: 4 GB.
	$(BIN)/python benchmarks/peers_install.py

load: venv ## Send a chat workload to a running server (start one with make serve) and print latencies.
	$(BIN)/baton bench $(or $(ARGS),--workload chat --scale-lengths 0.1 --rate 2 --num-requests 200)

venv: $(STAMP) ## Create or update .venv from the lock files; nothing to do when it is current.

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or later: make PYTHON=...")'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@echo "Installing the locked packages into .venv: a few minutes the first time."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-nodeps.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f .venv/.baton-*
	@touch $@

clean: ## Remove caches and build outputs; .venv stays.
	rm -rf build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache benchmarks/out
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
