# Two commands do everything on a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ENGINE := tests/e2e/test_containers.py tests/e2e/test_images.py tests/e2e/test_own_stack.py tests/e2e/test_local_docker.py tests/e2e/test_host_containers.py
TIMED := tests/train/node/test_node*.py tests/train/node/test_gce_vm.py tests/train/test_preemption.py
INSTALLED := .venv/.installed
JUDGES := .venv/judges
COLAB := .venv/colab
export PYTHONDONTWRITEBYTECODE := # hundreds of processes would each compile what they import

.DEFAULT_GOAL := help
PART ?= 1/1
EXAMPLES ?= 4000
.PHONY: help demo test test-fast e2e e2e-containers e2e-runs judges fuzz mutants lint golden lock audit bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "launch needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Set it: make PYTHON=python3.11 …")'
	@echo "Installing into .venv (once; some minutes, mostly PyTorch) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c dev.lock -e ".[dev]"
	@$(BIN)/python -c "import torch._dynamo, google.cloud.aiplatform_v1, google.cloud.compute_v1" # byte code of what all need
	@touch $@

demo: $(INSTALLED) ## Train a small GPT on this machine with two DDP processes
	@$(BIN)/launch local job_specs/quickstart.yaml --gpus 2 --dry-run
	@$(BIN)/launch local job_specs/quickstart.yaml --gpus 2 --new

test: PART = none
test: $(INSTALLED) ## Run the tests but the slow ones; PART=1/1: those too; PART=1/3: a third of those
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder --part $(PART) $(TIMED:%=--ignore-glob=%)
	$(BIN)/pytest -q -n 2 --part $(PART) $(wildcard $(TIMED)) # by themselves: these start processes, and stop them within seconds
	@echo "Not run: slow tests (of PART=$(PART) all others), make e2e (whole runs; needs root), make judges, make fuzz"

test-fast: $(INSTALLED) ## While you edit: the tests that need no torch, no Google client and no process
	$(BIN)/pytest -q -n 2 --dist loadfile $$($(BIN)/python -m tests.fast)

e2e: $(INSTALLED) ## Run the end-to-end tests; PART=1/3: a third
	@$(MAKE) --no-print-directory -j 2 --output-sync=target e2e-containers e2e-runs

e2e-containers: $(INSTALLED) # in an engine and a registry of their own
	$(BIN)/pytest -q -m e2e --part $(PART) $(ENGINE)
	$(BIN)/pytest -q -m e2e --part $(PART) -n 4 tests/startup # these mostly wait

e2e-runs: $(INSTALLED) # whole runs in processes
	$(BIN)/pytest -q -m e2e --part $(PART) -n 2 --dist loadfile tests/e2e tests/train/performance/test_compile.py $(ENGINE:%=--ignore=%)

judges: $(JUDGES)/.installed $(COLAB)/.installed ## Other frameworks under the node, other programs on what launch writes; PART=1/3: a third
	$(JUDGES)/bin/python -m pytest -q -m judges -n 2 --part $(PART) tests/judges tests/train/data/test_tables.py

# An environment that has the packages of .venv too: TensorFlow beside torch changes what other tests' packages import.
$(JUDGES)/.installed: $(INSTALLED)
	@$(BIN)/python -m venv --without-pip --clear $(JUDGES)
	@$(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
	  > $$(echo $(JUDGES)/lib/python3*/site-packages)/parent.pth
	@$(BIN)/python -m pip --python $(JUDGES)/bin/python install --quiet --disable-pip-version-check --no-compile -c dev.lock -e ".[judges]"
	@touch $@

# Google's program for Colab. It wants Python 3.12, and works with 3.11.
$(COLAB)/.installed: $(INSTALLED) colab.lock
	@$(BIN)/python -m venv --without-pip --clear $(COLAB)
	@$(BIN)/python -m pip --python $(COLAB)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps --ignore-requires-python -r colab.lock
	@touch $@

fuzz: $(INSTALLED) ## Generated specs, EXAMPLES for each kind, and more trials of submitting one run twice
	LAUNCH_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q -m fuzz tests/spec tests/runs/test_submit_trials.py

mutants: $(INSTALLED) ## One-line breaks that a test must notice; PART=1/8: an eighth
	$(BIN)/python -m tests.mutate --part $(PART)

lint: $(INSTALLED) ## Format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --python-version 3.14 --no-warn-unreachable --follow-imports silent --cache-dir .mypy_cache/win32 \
	  --exclude launcher/cli/flows/launch.py launcher/cli launcher/inputs launcher/plan launcher/spec launcher/catalog train/launch_train/common/config.py # docs/clients.md
	$(BIN)/lint-imports
	$(BIN)/shellcheck launcher/services/compute/startup.sh launcher/services/compute/mounts.sh

golden: $(INSTALLED) ## Renew what is recorded: golden files, recipes, the schema
	$(BIN)/python -m tests.golden.renew

# dev.lock is without pip, which would replace itself while it installs.
lock: $(INSTALLED) ## Renew the locks: the image's digests and packages, the tests' packages
	$(BIN)/python -m containers.lock
	$(BIN)/python -m uv pip compile --quiet --no-config --upgrade --universal --python-version 3.11 --no-header --no-annotate \
	  --no-emit-package pip --extra dev --extra judges --output-file dev.lock pyproject.toml
	echo google-colab-cli | $(BIN)/python -m uv pip compile --quiet --no-config --upgrade --python-version 3.12 --no-header --no-annotate \
	  --constraint dev.lock --output-file colab.lock -

audit: $(INSTALLED) ## Known vulnerabilities in what is locked (asks PyPI)
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -r containers/requirements.lock -r containers/torch-cu130.lock

bench: $(INSTALLED) ## Start-up and planning, measured side by side
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.planning

clean: ## Remove what was made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
