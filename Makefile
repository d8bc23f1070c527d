# Two commands from a fresh clone: `make demo` and `make test`. Both set themselves up; `make setup` does only that.
# Needs Python 3.11+ with headers, git, make and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of processes. Without byte code each would compile the package again, and each pytest worker all tests.
unexport PYTHONDONTWRITEBYTECODE
# An editable install contains a list of all modules, so a new module needs a new install.
MODULES := $(shell find commlayer -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
STAMP := .venv/.commlayer-ready-$(MODULES)
# These tests measure links and speeds and run alone. All others pass on a busy machine. Many wait for processes and deadlines, so
# three files run in parallel, in the order of their names, which has no long file last. A test that kills its pytest worker is
# repeated by a new one, at most three times.
ALONE := $(wildcard tests/nightly/test_lab_*.py) $(addprefix tests/nightly/test_,autoplan_links.py comm_cost_live.py \
	shares_live.py balancing_example.py)
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 3
SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(wildcard native/src/* native/include/*)

.PHONY: setup demo test test-all lint types recipes engines wheels rivals cuda bench bench-check fuzz docs clean
setup: $(STAMP)

$(STAMP): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch scikit-build-core nanobind cmake ninja
	COMMLAYER_REQUIRE_NATIVE=1 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev,bench,plot,tune]"
	@rm -f .venv/.commlayer-ready*
	@touch $@

$(STAMP)-recipes: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "commlayer[recipes]"
	@touch $@

$(STAMP)-engines: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "commlayer[engines]"
	@touch $@

demo: setup
	$(BIN)/commlayer demo

# The check before each commit, 7 to 9 minutes on 2 cores: all tests except those marked `nightly` (tests/conftest.py).
test: setup types
	$(BIN)/ruff check .
	$(BIN)/python -m pytest $(PARALLEL) -m "not nightly" $(addprefix --ignore=,$(ALONE)) tests

# All tests. Without network the frameworks cannot be installed, and their tests are skipped with this reason.
test-all: test
	-@$(MAKE) -s $(STAMP)-recipes
	-@$(MAKE) -s $(STAMP)-engines
	$(BIN)/python -m pytest $(PARALLEL) -m nightly $(addprefix --ignore=,$(ALONE)) tests
	$(BIN)/python -m pytest $(ALONE)

# What pre-commit checks: ruff's rules, types (tests included), and the import order of the package. The tree is not formatted by
# `ruff format`: it would reflow tables of cases and break nearly every line of history.
lint: setup types
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/multi/test_layering.py

types: setup
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy --exclude 'tests/(chaos|sim)/' tests

# docs/how-to/frameworks.md: commlayer.integrations and examples with Accelerate, transformers, TRL and Lightning (300 MB)
recipes: $(STAMP)-recipes
	$(BIN)/python -m pytest -rs tests/nightly/test_recipes_*.py

# docs/how-to/ray.md, skypilot.md, kubernetes.md (300 MB); slurm.md needs slurmctld and slurmd (Debian: slurm-wlm), too
engines: $(STAMP)-engines
	$(BIN)/python -m pytest -rs tests/nightly/test_engines_*.py

# CONTRIBUTING.md: builds and checks source archive and wheel in dist/. cibuildwheel builds wheels for other Pythons and CPUs.
wheels: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "commlayer[release]"
	rm -rf dist
	COMMLAYER_REQUIRE_NATIVE=1 $(BIN)/python -m build -q --no-isolation -o dist
	PATH=$(BIN):$$PATH $(BIN)/python -m auditwheel repair -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	! ls dist/*-abi3-*.whl 2>/dev/null || $(BIN)/python -m abi3audit --strict dist/*-abi3-*.whl
	$(BIN)/python -m pytest tests/nightly/test_release.py

# docs/benchmarks.md: other systems for `bench tta` and `bench storms`, each in a separate environment (2 GB)
RIVALS := torchft==0.2.0 hivemind==1.1.12
rivals: $(foreach rival,$(RIVALS),.rivals/$(rival))

.rivals/%:
	$(PYTHON) -m venv .rivals/$(firstword $(subst ==, ,$*))
	.rivals/$(firstword $(subst ==, ,$*))/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch scikit-learn $*
	.rivals/$(firstword $(subst ==, ,$*))/bin/python -c "import $(firstword $(subst ==, ,$*))"
	@touch $@

# Compiles the CUDA sources for every target. Needs nvcc, but no GPU.
cuda: setup
	COMMLAYER_CUDA_TARGETS="75 80 86 89 90 100 120" $(BIN)/python -m pytest tests/nightly/test_cuda_codecs.py -k compile

# make bench NAME=overhead
bench: setup
	$(BIN)/python -m bench $(NAME)

# Measures a few ratios and fails if one is worse than in bench/data/expected.json. Run it before an issue is resolved.
bench-check: setup
	$(BIN)/python -m bench check

# make fuzz SECONDS=3600: property tests on new cases, and damaged payloads, with sanitizers if the compiler has them
SECONDS ?= 300
fuzz: setup
	$(BIN)/python -m pytest -q -n 2 -m hypothesis --hypothesis-profile=new
	$(BIN)/python tests/nightly/fuzz.py --seconds $(SECONDS)

# Generates pages and tables from the code, and builds the documentation in build/site. Needs no network once installed.
docs: $(STAMP)-docs
	$(BIN)/python docs/codec_table.py docs/reference/codecs.md
	$(BIN)/python docs/verdicts.py docs/explanation/should-i-use-it.md
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/build_site.py

$(STAMP)-docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "commlayer[docs]"
	@touch $@

clean:
	rm -rf build .venv .rivals .mypy_cache .ruff_cache .hypothesis
