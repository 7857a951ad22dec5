# Every target sets up what it needs in .venv, on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= demo-output
BIN := $(VENV)/bin
# Triton decides when it is imported whether its interpreter runs the kernels, so these tests have processes of their own.
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
PIP := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: venv demo test test-all test-gpu style quality bench clean

# Train a small model on real text and see what its memory is worth; TEXT=path for a text of your own.
demo: $(VENV)/demo-installed
	@$(BIN)/python examples/demo.py --output $(OUTPUT) $(if $(TEXT),--text "$(TEXT)")

# The suite, within minutes on two cores.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" --ignore tests/test_triton.py
	$(INTERPRETED) -m "not slow and not gpu" tests/test_triton.py

# The suite with its long tests.
test-all: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu" --ignore tests/test_triton.py
	$(INTERPRETED) -m "not gpu" tests/test_triton.py

test-gpu: venv
	$(BIN)/python -m pytest -m gpu

# Rewrite the sources in the project's style.
style: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Check style and types.
quality: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

bench: venv
	@for script in benchmarks/*.py; do if [ -f "$$script" ]; then $(BIN)/python "$$script" || exit 1; fi; done

clean:
	rm -rf $(VENV) build demo-output .pytest_cache .hypothesis .ruff_cache .mypy_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(VENV)/dev-installed

$(VENV)/dev-installed: $(VENV)/demo-installed
	$(PIP) --editable ".[dev]"
	@touch $@

# torch comes first and alone: with it in place, nothing that follows looks for another one.
$(VENV)/demo-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=path/to/python")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep ^torch== constraints.txt)"
	$(PIP) --editable . matplotlib
	@touch $@
