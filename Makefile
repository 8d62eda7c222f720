# `make serve` and `make test` set up everything they need, on a fresh machine too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU wheel of this version serves machines without a GPU; override for another build.
TORCH ?= torch==2.13.0
# The index to take torch from; the one that torch's own instructions name for CPUs has much smaller packages.
TORCH_INDEX ?=
# Three processes share the files of tests, because many wait for servers that start; a file's tests stay together.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Servers and commands are started by the hundred: what Python has compiled once, the next one finds.
unexport PYTHONDONTWRITEBYTECODE

# Small tests of the kernels; of those that no interpreter runs, some of the tests for the GPU.
SANITIZED := $(foreach name,attention copy_blocks decode_inputs decode_schedule elementwise sample logprobs logit_processors skinny_gemm prefill_schedule,tests/kernels/test_gpu_$(name).py)
SANITIZED_ON_CUDA := tests/gpu/test_hopper_attention_on_cuda.py tests/gpu/test_hopper_gemm_on_cuda.py
SANITIZE := compute-sanitizer --tool memcheck --error-exitcode 1

# Before a command: a line every 8 s until it ends. pip unpacks and compiles in silence where there is no terminal. It ends
# with the shell, also after Ctrl-C.
TICKING := ( seconds=0; while sleep 8 && kill -0 $$$$ 2> /dev/null; do seconds=$$((seconds + 8)); echo "    $$seconds s"; done ) &

.PHONY: serve docs test test-long test-gpu sanitize test-clients test-browser test-mutants test-chaos test-attack lint clean

serve: $(VENV)/.serve
	$(BIN)/quire serve $(ARGS)

SUITE := tests --ignore=tests/gpu --ignore=tests/chaos --ignore=tests/attack --ignore=tests/clients --ignore=tests/browser

test: $(VENV)/.test
	$(BIN)/python -m pytest $(SUITE) $(WORKERS) $(ARGS)

# Every example of every grid (tests/tiers.py), and all mutants; `make test` runs some of each kind.
test-long: $(VENV)/.test
	$(BIN)/python -m pytest $(SUITE) --long $(WORKERS) $(ARGS)
	$(BIN)/python -m tests.mutants.run --jobs 2

# With a GPU the kernels' own tests run on it, too; without one, in Triton's interpreter, and tests/gpu is skipped.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu tests/kernels/test_gpu_*.py -rs $(ARGS)

# Out-of-bounds accesses in small tests of the kernels, on a GPU, with NVIDIA's compute-sanitizer.
sanitize: $(VENV)/.test
	$(SANITIZE) $(BIN)/python -m pytest $(SANITIZED) $(ARGS)
	$(SANITIZE) $(BIN)/python -m pytest $(SANITIZED_ON_CUDA) -k "agree or captured or padding" $(ARGS)

# Third-party client libraries, each in its own environment below .venv-clients, against the real server.
test-clients: $(VENV)/.test
	$(BIN)/python -m pytest tests/clients $(ARGS)

# The web pages in headless Chromium, over a scripted server; skipped where there is no Chromium (Debian: apt install chromium).
test-browser: $(VENV)/.test
	$(BIN)/python -m pytest tests/browser -rs $(ARGS)

# Mutation tests: one injected bug at a time in a copy of the package; the suite must catch 95 % of them.
test-mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants.run --jobs 2 $(ARGS)

# Chaos tests: kills, many clients and overload against the real server, with a table of figures at the end; some minutes.
test-chaos: $(VENV)/.test
	$(BIN)/python -m pytest tests/chaos -s $(ARGS)

# Attacks on the real server: grammar bombs, floods, bodies that never end, readers that never read, malformed requests.
test-attack: $(VENV)/.test
	$(BIN)/python -m pytest tests/attack -s $(ARGS)

# The documentation as a site in site/; a broken link or a page outside the navigation is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.test
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@echo "1/3 creating $(VENV)"
	@$(TICKING) $(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q --upgrade pip
	@echo "2/3 installing $(TORCH): the CPU build takes 757 MB of disk, one with CUDA several times that"
	@$(TICKING) $(BIN)/pip install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"

# Installing compiles the native CPU kernels.
NATIVE := $(wildcard src/quire/kernels/cpu/native/*.h src/quire/kernels/cpu/native/*.cpp)

$(VENV)/.serve: pyproject.toml $(NATIVE) $(BIN)/python
	@echo "3/3 installing quire and compiling its CPU kernels: about a minute"
	@$(TICKING) $(BIN)/pip install -e ".[serve]"
	touch $@

$(VENV)/.docs: pyproject.toml $(BIN)/python
	$(BIN)/pip install -q -e ".[docs]"
	touch $@

$(VENV)/.test: pyproject.toml $(NATIVE) $(BIN)/python
	$(BIN)/pip install -q -e ".[test,lint]"
	-$(BIN)/mypy > /dev/null  # most of its time is for the stubs of torch and numpy: read once, then in its cache
	-$(BIN)/python -m pytest --collect-only -qq $(SUITE) > /dev/null  # the same: each process would rewrite all assertions
	touch $@ $(VENV)/.serve $(VENV)/.docs

clean:
	rm -rf $(VENV) .venv-clients .cache site
