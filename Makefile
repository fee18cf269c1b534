# `make run` does the main job, `make test` checks everything; `make help`
# lists the rest. All that is installed goes to .venv.

BACKEND ?= jax
PYTHON ?= python3
# On the index of PyTorch or of your company you may prefer another build.
TORCH ?= torch==2.13.0

BIN := .venv/bin
BACKENDS := jax tensorflow torch
PYTEST := $(BIN)/python -m pytest
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

export TF_CPP_MIN_LOG_LEVEL ?= 2
export NO_COLOR ?= 1
# PyTorch's threads wait by spinning otherwise: eight times slower as soon as
# the cores have other work.
export OMP_WAIT_POLICY ?= passive
ifeq ($(filter $(BACKEND),$(BACKENDS)),)
$(error BACKEND must be one of: $(BACKENDS). Received: BACKEND=$(BACKEND))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run lab test test-full test-gpu lint notebooks pair docs bench \
	clean $(BACKENDS:%=test-%) $(BACKENDS:%=full-%) $(BACKENDS:%=notebooks-%) \
	$(BACKENDS:%=bench-%) bench-gpu

help: ## List the targets.
	@echo "make TARGET [BACKEND=jax|tensorflow|torch]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s%s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)

# --- the environment: one .venv, which grows with what is asked for ---------

.venv/.made:
	@echo "[setup] making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@touch $@

# PyTorch goes first and by its exact version: a range asked for by another
# package may bring a build with several gigabytes of GPU libraries.
.venv/.torch: .venv/.made
	@echo "[setup] installing $(TORCH)"
	@$(BIN)/python -m pip install -qq $(TORCH)
	@touch $@

.venv/.run-torch: .venv/.torch
.venv/.run-%: .venv/.made pyproject.toml
	@echo "[setup] installing the library with $* and the notebook tools"
	@$(BIN)/python -m pip install -qq --editable ".[$*,notebooks]"
	@touch $@

.venv/.test: .venv/.torch pyproject.toml
	@echo "[setup] installing the three backends, the peers, the test tools"
	@$(BIN)/python -m pip install -qq --editable \
		".[jax,tensorflow,torch,hub,pretrained,plots,notebooks,test]"
	@touch $@ $(BACKENDS:%=.venv/.run-%)

.venv/.docs: .venv/.made pyproject.toml
	@echo "[setup] installing the documentation tools"
	@$(BIN)/python -m pip install -qq --editable ".[docs]"
	@touch $@

# --- the main job -----------------------------------------------------------

run: .venv/.run-$(BACKEND) ## Run the quickstart: train, generate, save, reload.
	@echo "[run] executing notebooks/01_quickstart on $(BACKEND)"
	@KERAS_BACKEND=$(BACKEND) $(BIN)/python scripts/run_notebook.py \
		notebooks/01_quickstart.ipynb build/run/$(BACKEND)

lab: .venv/.run-$(BACKEND) ## Open JupyterLab on the notebooks.
	@echo "[lab] opening JupyterLab on notebooks/ with $(BACKEND)"
	@KERAS_BACKEND=$(BACKEND) $(BIN)/jupyter lab --notebook-dir=notebooks

# --- checks -----------------------------------------------------------------

test: lint $(BACKENDS:%=test-%) notebooks ## Lint, test, run notebooks on all backends.
	@echo "[test] all passed: linters, tests and notebooks on $(BACKENDS)"

test-full: lint $(BACKENDS:%=full-%) notebooks ## The same with the slow tests, without time budgets.
	@echo "[test-full] all passed: linters, tests and notebooks on $(BACKENDS)"

lint: .venv/.test ## Check style and layering.
	@echo "[lint] ruff and import-linter"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-cache

$(BACKENDS:%=test-%): test-%: .venv/.test
	@echo "[test-$*] tests on $*, each room within its budget"
	@KERAS_BACKEND=$* $(PYTEST) -q -p tests.budgets -m "not slow and not gpu"

$(BACKENDS:%=full-%): full-%: .venv/.test
	@echo "[full-$*] tests on $*, the slow ones too"
	@KERAS_BACKEND=$* $(PYTEST) -q -m "not gpu"

# .venv must hold a build of the backend for the GPU, as of TORCH=torch.
test-gpu: .venv/.test ## Run the tests that need a GPU, on BACKEND.
	@echo "[test-gpu] tests marked gpu on $(BACKEND)"
	@KERAS_BACKEND=$(BACKEND) $(PYTEST) -q -m gpu tests/gpu

notebooks: $(BACKENDS:%=notebooks-%) ## Execute the notebooks on all backends.

# Copies are executed, so that the committed notebooks stay without outputs.
$(BACKENDS:%=notebooks-%): notebooks-%: .venv/.test
	@echo "[notebooks-$*] executing $(words $(NOTEBOOKS)) notebook(s) on $*"
	@rm -rf build/notebooks/$* && mkdir -p build/notebooks/$*
	@cp $(NOTEBOOKS) build/notebooks/$*
	@KERAS_BACKEND=$* $(PYTEST) -q --nbmake --overwrite --timeout=1200 \
		--nbmake-kernel=python3 --nbmake-timeout=600 build/notebooks/$*
	@$(BIN)/python scripts/check_notebooks.py build/notebooks/$* $*

# --- the rest ---------------------------------------------------------------

pair: .venv/.test ## Write notebooks/*.ipynb anew from notebooks/*.py.
	@echo "[pair] notebooks/*.py -> notebooks/*.ipynb"
	@$(BIN)/jupytext --quiet --update --to ipynb notebooks/*.py

docs: .venv/.docs ## Build the documentation into site/.
	@echo "[docs] building the site, warnings are errors"
	@$(BIN)/mkdocs build --quiet --strict

BENCHES := attention blocks feed_forward positions masks training models \
	decode imports

bench: $(BACKENDS:%=bench-%) ## Compare time and memory with the peers'.

$(BACKENDS:%=bench-%): bench-%: .venv/.test
	@for script in $(BENCHES); do \
		echo "[bench-$*] benchmarks/$$script.py on $*"; \
		KERAS_BACKEND=$* $(BIN)/python benchmarks/$$script.py || exit 1; \
	done

# On machines with a CUDA GPU; not part of `bench`.
bench-gpu: .venv/.test
	@for backend in $(BACKENDS); do \
		echo "[bench-gpu] benchmarks/gpu.py on $$backend"; \
		KERAS_BACKEND=$$backend $(BIN)/python benchmarks/gpu.py || exit 1; \
	done

clean: ## Remove .venv and everything built.
	@echo "[clean] removing .venv, build, site and caches"
	@rm -rf .venv .cache build dist site *.egg-info .pytest_cache \
		.ruff_cache .hypothesis .import_linter_cache
