# Every target sets up what it needs in .venv, on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= demo-output
# An environment of its own for the transformers that had Transformer-XL, and tokenised prose, where there is some.
LEGACY ?= .venv-legacy
PEER := --peer-python $(LEGACY)/bin/python
PROSE ?= wikitext-2/wiki.test.tokens
BIN := $(VENV)/bin
FUZZ_MINUTES ?= 5
MUSIC ?= build/music
# The newest torch, unless told otherwise: see test-oldest. transformers 5.24 works, but `load_adapter` of its own wants
# PEFT 0.22, which is not released.
CONSTRAINTS ?= constraints.txt
TRANSFORMERS ?= "transformers<5.24"
# Triton decides when it is imported whether its interpreter runs the kernels, so these tests have processes of their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=10 --durations-min=1
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST)
PIP := $(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS)
# What pip would do to each of 15,000 files in turn, on all cores: in 45 seconds instead of 80. It counts as failed for the
# few that are templates or of another Python.
COMPILE := @$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: venv demo test test-all test-gpu test-oldest test-clients style quality docs release kernel mutants fuzz bench bench-gpu paper half-hours music clean

# Train a small model on real text and see what its memory is worth; TEXT=path for a text of your own.
demo: $(VENV)/demo-installed
	@$(BIN)/python examples/demo.py --output $(OUTPUT) $(if $(TEXT),--text "$(TEXT)")

# The suite, in ten to fifteen minutes on two cores; ends with its ten slowest. Hypothesis draws the same examples in each
# run, so that a change is what makes it fail; test-all draws new ones.
test: venv
	$(PYTEST) --hypothesis-profile ci --dist loadfile -m "not slow and not gpu" --ignore tests/kernels/test_triton.py
	$(INTERPRETED) -m "not slow and not gpu" tests/kernels/test_triton.py

# The suite with its long tests.
test-all: venv
	$(PYTEST) --dist loadfile -m "not gpu" --ignore tests/kernels/test_triton.py
	$(INTERPRETED) -m "not gpu" tests/kernels/test_triton.py

test-gpu: venv
	$(BIN)/python -m pytest -m gpu

# The suite with the oldest transformers that is promised, in an environment of its own. CONSTRAINTS=FILE, with a line
# like torch==2.6.0, for the oldest torch too.
test-oldest:
	$(MAKE) test VENV=.venv-oldest TRANSFORMERS=transformers==5.17.0

# Programs that use the package, in the versions of tests/clients/requirements.txt, in an environment of their own. Those
# in a browser need chromium and npm, DeepSpeed a C++ compiler; ninja comes with it, and is looked for among the programs.
test-clients:
	$(MAKE) venv VENV=.venv-clients
	.venv-clients/bin/python -m pip install --constraint $(CONSTRAINTS) --requirement tests/clients/requirements.txt
	OMP_NUM_THREADS=1 TXL_CLIENTS=all .venv-clients/bin/python -m pytest tests/clients
	PATH="$(CURDIR)/.venv-clients/bin:$$PATH" OMP_NUM_THREADS=1 .venv-clients/bin/python -m pytest -k deepspeed \
		tests/training/test_trainer.py tests/commands/test_train_lm.py

# Rewrite the sources in the project's style.
style: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Check style and types.
quality: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation, as a site in build/site. A link that leads nowhere is an error: --quiet would hide it from --strict.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Everything of a release but the upload: sdist, wheel and an empty environment with it, in build/release, and the site.
release: docs
	PYTHON=$(BIN)/python .ci/release

# The Triton kernels as a folder that huggingface's `kernels` library loads, in build/kernel.
kernel:
	$(PYTHON) examples/hub_kernel.py --output build/kernel

# Whether the tests would notice: 210 seeded changes to the sources, each of which some test should find.
mutants: venv
	$(BIN)/python tests/mutants.py

# Damaged and hostile files for every reader, from a seed that it prints; FUZZ_MINUTES for all of them together.
fuzz: venv
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --minutes $(FUZZ_MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/training/test_checkpoints.py -k "runs or damage"

# Every benchmark for a CPU, half an hour on two cores; then the tables, and whether the ratios are those committed.
bench: venv $(LEGACY)/installed
	rm -rf build/benchmarks && mkdir -p build && cp -R benchmarks/results build/benchmarks
	$(BIN)/python benchmarks/model.py --device cpu $(PEER)
	$(BIN)/python benchmarks/sliding_window.py --device cpu
	$(BIN)/python benchmarks/attention_kernel.py --device cpu
	$(BIN)/python benchmarks/softmax.py --device cpu $(PEER)
	$(BIN)/python benchmarks/growth.py --device cpu
	if [ -f "$(PROSE)" ]; then $(BIN)/python benchmarks/tokenizer.py --text "$(PROSE)" $(PEER); fi
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/report.py --compare build/benchmarks benchmarks/results

# Every benchmark for a GPU, a hundred minutes at most; benchmarks/gpu.py --help for fewer minutes.
bench-gpu: venv
	$(BIN)/python benchmarks/gpu.py --minutes 100
	$(BIN)/python benchmarks/report.py

# The paper's tables and figures as a miniature, in at most 100 minutes on two cores. Stopped, it goes on where it was.
paper: venv
	$(BIN)/python examples/paper/miniature.py
	$(BIN)/python examples/paper/ablation.py --workers 2
	$(BIN)/python examples/paper/ablation.py --workers 2 --shuffled
	$(BIN)/python examples/paper/context_length.py
	$(BIN)/python examples/paper/attention_maps.py
	$(BIN)/python examples/paper/article.py
	$(BIN)/python examples/paper/page.py

# Recipes beside one another at equal seconds, three seeds, each model read in four ways; most of a day on two cores that do
# nothing else. TEXTS=folder of the texts. Stopped, it goes on where it was.
half-hours: venv
	$(BIN)/python examples/half_hours.py --texts $(TEXTS)

# Bach's chorales from the corpus in music21's package: a small model, five pieces of it, and what they are made of; a
# quarter of an hour on two cores. Stopped, it goes on where it was.
music: $(VENV)/music-installed
	test -d $(MUSIC)/chorales || $(BIN)/python examples/music/chorales.py --output $(MUSIC)/chorales
	test -d $(MUSIC)/data || $(BIN)/txl-prepare --corpus midi --input $(MUSIC)/chorales/midi \
		--tokenizer $(MUSIC)/chorales/tokenizer --bpe 700 --transpose 3 --output $(MUSIC)/data
	$(BIN)/txl-train examples/recipes/music_small.yaml --data $(MUSIC)/data --output $(MUSIC)/model --resume
	rm -rf $(MUSIC)/pieces
	$(BIN)/python examples/music/generate.py --model $(MUSIC)/model --output $(MUSIC)/pieces --count 5 --bars 16 \
		$(if $(shell command -v fluidsynth),--wav)
	$(BIN)/python examples/music/measures.py --pieces $(MUSIC)/pieces --corpus $(MUSIC)/chorales/midi --output $(MUSIC)/pieces/README.md

clean:
	rm -rf $(VENV) .venv-oldest .venv-clients $(LEGACY) build demo-output .pytest_cache .hypothesis .ruff_cache .mypy_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(VENV)/dev-installed

# With all that the demo needs.
$(VENV)/dev-installed: $(VENV)/torch-installed
	$(PIP) --editable ".[dev]" $(TRANSFORMERS)
	$(COMPILE)
	@touch $(VENV)/demo-installed $@

$(VENV)/demo-installed: $(VENV)/torch-installed
	$(PIP) --editable . matplotlib $(TRANSFORMERS)
	$(COMPILE)
	@touch $@

$(VENV)/music-installed: $(VENV)/torch-installed
	$(PIP) --editable ".[music]" $(TRANSFORMERS)
	$(COMPILE)
	@touch $@

# torch comes first and alone: with it in place, nothing that follows looks for another one.
$(VENV)/torch-installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=path/to/python")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep ^torch== $(CONSTRAINTS))"
	@touch $@

$(LEGACY)/installed: constraints.txt
	$(PYTHON) -m venv $(LEGACY)
	$(LEGACY)/bin/python -m pip install "$$(grep ^torch== constraints.txt)"
	$(LEGACY)/bin/python -m pip install --constraint constraints.txt transformers==4.35.2 sacremoses "numpy<2"
	@touch $@
