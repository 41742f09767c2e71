# The two commands of a fresh clone: `make quickstart` and `make test`. Both need only Python 3.11+, pip and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
# Three files at a time: the tests that start processes wait for them, and two left a quarter of two cores idle.
# Compiled files are kept, also where the environment says otherwise: each program that a test starts would compile the package
# again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
TYPES := $(BIN)/basedpyright --pythonpath $(BIN)/python

.NOTPARALLEL: # pip installs into one environment
.PHONY: help quickstart test test-quick test-gpu test-lower-bounds test-newest test-ci test-all test-other-machines release site digests lint format types docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/installed ## train a small GPT on Python's documentation and let it write (a minute of training)
	$(BIN)/nanogpt-hf launch --config_file accelerate_configs/cpu.yaml pretrain recipes/quickstart.yaml --auto-resume
	@echo
	@echo "A sample from the model:"
	@$(BIN)/nanogpt-hf sample runs/quickstart --prompt 'The ' --max-new-tokens 300 --temperature 0.6
	@echo
	@echo "To try next:"
	@echo "  $(BIN)/nanogpt-hf sample runs/quickstart --prompt 'class ' --num-samples 3"
	@echo "  $(BIN)/nanogpt-hf pretrain recipes/quickstart.yaml --data.source YOUR_TEXT.txt --run-dir runs/mine"
	@echo
	@echo "The model is in runs/quickstart/best. All of the run on one page, for a browser:"
	@echo "  $(CURDIR)/runs/quickstart/report.html"

test: $(VENV)/installed-test ## run the tests (about five minutes on two quiet cores)
	$(PYTEST) -m 'not slow'

test-quick: $(VENV)/installed-test-quick ## run the tests that start no processes and train little, with few packages
	$(PYTEST) -n 2 -m 'not long and not slow'

test-gpu: $(VENV)/installed-test ## run the tests of a GPU, on one (up to five minutes)
	DEVICE=cuda $(BIN)/python -m pytest tests/gpu

# The lowest versions that fit each other, as uv resolves them; TORCH=2.13.0 takes another torch.
test-lower-bounds: ## run the tests of numbers under the lowest versions of pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip compile --quiet --resolution lowest-direct pyproject.toml -o .venv-lowest/all.txt
	grep -vE '^($(if $(TORCH),torch|)nvidia|cuda|triton)' .venv-lowest/all.txt >.venv-lowest/lowest.txt
	$(if $(TORCH),echo 'torch==$(TORCH)' >>.venv-lowest/lowest.txt)
	.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/lowest.txt --editable '.[test-quick]'
	.venv-lowest/bin/python -m pytest -m 'not long and not slow' tests/model tests/optim tests/training tests/distributed tests/methods

# What `pip install` takes today, where constraints.txt has the versions of the last tests.
test-newest: ## run the quick tests under the newest versions of all packages
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[test-quick]'
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m 'not long and not slow'

# Each is tried by `uvx`, in an environment that has nothing else, as a user would who has no clone.
release: ## build wheel and sdist into dist/, check them, and train with each in a bare environment
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet uv
	rm -rf dist
	.venv-release/bin/uv build --quiet
	.venv-release/bin/uvx --quiet twine check --strict dist/*
	for file in dist/*; do \
	    .venv-release/bin/uvx --quiet --isolated --constraints constraints.txt --from "$$PWD/$$file" nanogpt-hf \
	        pretrain quickstart --train.max_steps 20 --data.dir dist/try/data --run-dir dist/try/run --overwrite || exit 1; \
	done
	rm -rf dist/try

site: $(VENV)/installed-site ## build the site of the documentation into site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

digests: $(VENV)/installed-test ## run small reference runs and print digests of their numbers
	$(BIN)/python tests/run_digests.py $(ARGS)

# The type checker is one process that runs for a minute or more, so the tests run at the same time. Its output comes when it ends.
define types_and_tests
{ $(TYPES) >$(VENV)/types.log 2>&1; status=$$?; cat $(VENV)/types.log; exit $$status; } & types=$$!; \
	$(PYTEST) $(1); tests=$$?; \
	wait $$types || { echo "The types have errors: see above, or run make types"; exit 1; }; \
	exit $$tests
endef

test-ci: lint $(VENV)/installed-test $(VENV)/installed-types ## run lint, types and all tests but exhaustive ones: what has to pass before a change lands
	$(call types_and_tests,-m 'not exhaustive')

test-all: lint $(VENV)/installed-test $(VENV)/installed-types ## run lint, types and every test (up to an hour on two cores)
	$(call types_and_tests,)

test-other-machines: $(VENV)/installed-test ## run the tests of numbers and processes as on other machines, in three runs
	$(BIN)/python tests/other_machines.py $(ARGS)

lint: $(VENV)/installed-test-quick ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-test-quick ## repair what can be repaired of style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-types ## check the types
	$(TYPES)

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/installed-%: $(VENV)/installed
	$(INSTALL) '.[$*]'
	touch $@

docs: $(VENV)/installed ## write what follows from the code: tables in docs/, the graph in CONTRIBUTING.md
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/decoder_types.py
	$(BIN)/python docs/structure.py

clean: ## remove the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-release .ci/venv build dist site *.egg-info .pytest_cache .ruff_cache
	find nanogpt_hf tests -name __pycache__ -prune -exec rm -rf {} +
