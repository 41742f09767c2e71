# The two commands of a fresh clone: `make quickstart` and `make test`. Both need only Python 3.11+, pip and make.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-quick digests clean

quickstart: .venv/installed
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml cli.py pretrain recipes/quickstart.yaml --overwrite
	@echo
	@echo "A sample from the model:"
	@$(BIN)/python cli.py sample runs/quickstart --prompt 'The ' --max-new-tokens 300 --temperature 0.6
	@echo
	@echo "To try next:"
	@echo "  $(BIN)/python cli.py sample runs/quickstart --prompt 'class ' --num-samples 3"
	@echo "  $(BIN)/python cli.py pretrain recipes/quickstart.yaml --data.source YOUR_TEXT.txt --data.dir data/mine --run-dir runs/mine"
	@echo
	@echo "The model is in runs/quickstart/best. All of the run on one page, for a browser:"
	@echo "  $(CURDIR)/runs/quickstart/report.html"

# Two at a time, a file each: the tests that start processes wait for them most of the time.
test: .venv/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile

# without what starts several processes or trains for a while
test-quick: .venv/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not long'

# Small reference runs, to compare their numbers before and after a refactoring: see tests/run_digests.py.
digests: .venv/installed-test
	$(BIN)/python tests/run_digests.py $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv runs data
