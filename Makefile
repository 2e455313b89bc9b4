# Two commands do everything on a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ENGINE := tests/e2e/test_containers.py tests/e2e/test_images.py tests/e2e/test_local_docker.py
TIMED := tests/train/node/test_node*.py tests/train/node/test_gce_vm.py tests/train/test_preemption.py
INSTALLED := .venv/.installed
export PYTHONDONTWRITEBYTECODE := # hundreds of processes would each compile what they import

.DEFAULT_GOAL := help
PART ?= 1/1
.PHONY: help demo test test-fast e2e fuzz mutants lint golden lock audit bench clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "launch needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Say which: make PYTHON=python3.11 …")'
	@echo "Installing into .venv (once; some minutes, mostly PyTorch) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile "torch==2.13.0" -e ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # pip does it on one processor; some files are no Python
	@touch $@

demo: $(INSTALLED) ## Train a small GPT on this machine with two DDP processes
	@$(BIN)/launch local job_specs/quickstart.yaml --gpus 2 --dry-run
	@$(BIN)/launch local job_specs/quickstart.yaml --gpus 2 --new

test: $(INSTALLED) ## The tests
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(TIMED:%=--ignore-glob=%)
	$(BIN)/pytest -q -n 2 $(wildcard $(TIMED)) # by themselves: these start processes, and stop them within seconds
	@echo "Left out: make e2e (whole runs; a Docker engine and a registry, which need root), make fuzz"

test-fast: $(INSTALLED) ## While you edit: the tests that need no torch, no Google client and no process
	$(BIN)/pytest -q -n 2 --dist loadfile $$($(BIN)/python -m tests.fast)

e2e: $(INSTALLED) ## The whole way, with real processes
	$(BIN)/pytest -q -m e2e -n 4 tests/startup # these mostly wait
	@$(BIN)/pytest -q -m e2e $(ENGINE) >.engine.log 2>&1 & \
	$(BIN)/pytest -q -m e2e tests/e2e tests/train/performance/test_compile.py $(ENGINE:%=--ignore=%); others=$$?; \
	wait $$!; engine=$$?; cat .engine.log; rm .engine.log; exit $$((others + engine))

fuzz: $(INSTALLED) ## Ten thousand generated specs, and more trials of submitting one run twice
	$(BIN)/pytest -q -m fuzz tests/spec tests/runs/test_submit_trials.py

mutants: $(INSTALLED) ## One-line breaks that a test must notice; PART=1/4: a quarter
	$(BIN)/python -m tests.mutate --part $(PART)

lint: $(INSTALLED) ## Format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --python-version 3.14 --no-warn-unreachable --follow-imports silent --cache-dir .mypy_cache/win32 \
	  --exclude launcher/cli/flows/launch.py launcher/cli launcher/workspace launcher/plan launcher/spec launcher/catalog train/launch_train/common/config # docs/clients.md
	$(BIN)/lint-imports
	$(BIN)/shellcheck launcher/compute/startup.sh

golden: $(INSTALLED) ## Renew what is recorded: golden files, recipes, the schema
	$(BIN)/python -m tests.golden.renew

lock: $(INSTALLED) ## Renew the training image's locks: base digests, packages with hashes
	$(BIN)/python -m containers.lock

audit: $(INSTALLED) ## Known vulnerabilities in what is locked (asks PyPI)
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -r containers/requirements.lock -r containers/torch-cu130.lock

bench: $(INSTALLED) ## Start-up and planning, measured side by side
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.planning

clean: ## Remove what was made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
