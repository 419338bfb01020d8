# Two commands: `make demo` trains a model on this machine, `make test` tests everything.
PYTHON ?= $(firstword $(foreach version,3.11 3.12 3.13,$(shell python$(version) -c "" 2>/dev/null && echo python$(version))) python3)
VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 1

.PHONY: demo test quick coverage check types style wheel resolution bench gpu docs clean

demo: $(VENV)/.installed
	$(BIN)/python launchers/submit.py experiment=demo cluster=local $(ARGS)

# What fails among the tests of processes is tried once more, alone, and printed as flaky if it passes then.
test: $(VENV)/.installed check
	$(BIN)/python -m tests.suite $(ARGS)

quick: $(VENV)/.installed
	$(BIN)/python -m pytest tests/unit -m "not trial and not gpu" $(ARGS)

# Lines of the packages that the unit tests run. Not in `make test`: it doubles their CPU time (docs/contributing.md).
coverage: $(VENV)/.installed
	COVERAGE_CORE=$(shell $(PYTHON) -c "import sys; print('sysmon' if sys.version_info >= (3, 12) else 'ctrace')") \
	  $(BIN)/python -m pytest $(or $(ARGS),tests/unit) -m "not trial and not gpu" --cov --cov-report=term:skip-covered

check: $(VENV)/.installed
	$(MAKE) --jobs 2 --output-sync types style wheel

types: $(VENV)/.installed
	$(BIN)/mypy

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m docs.generate --check

wheel: $(VENV)/.installed
	$(BIN)/python -m tests.check_wheel

# Whether a machine that reaches nothing but the package index can install: no extra index, no folder of wheels.
resolution:
	folder=$$(mktemp -d) && mkdir $$folder/wheels && PIP_CONFIG_FILE=/dev/null PIP_EXTRA_INDEX_URL= PIP_FIND_LINKS=$$folder/wheels \
	  $(PYTHON) launchers/install.py $$folder/env --dry-run; code=$$?; rm -rf $$folder; exit $$code

bench: $(VENV)/.installed
	$(BIN)/python -m tests.bench.bench_rendezvous
	$(BIN)/python -m tests.bench.bench_streams
	$(BIN)/python -m tests.bench.bench_weights
	$(BIN)/python -m tests.bench.bench_training
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.bench_dispatch
	$(BIN)/python -m tests.bench.bench_scaling
	$(BIN)/python -m tests.bench.bench_sharing
	$(BIN)/python -m tests.bench.bench_loading
	$(BIN)/python -m tests.bench.bench_sft
	$(BIN)/python -m tests.bench.bench_rewards
	$(BIN)/python -m tests.bench.bench_sticky_routing
	$(BIN)/python -m tests.bench.bench_concurrency
	$(BIN)/python -m tests.bench.bench_kept_prefixes
	$(BIN)/python -m tests.bench.bench_agent_endpoint
	$(BIN)/python -m tests.bench.bench_actor
	$(BIN)/python -m tests.bench.bench_tails
	$(BIN)/python -m tests.bench.bench_tinker
	$(BIN)/python -m tests.bench.bench_tinker_sampling
	$(BIN)/python -m tests.bench.bench_demo
	$(BIN)/python -m tests.bench.bench_laptop

# What the trainer is held to, on the GPUs of this machine: make gpu RANKS=2
gpu: $(VENV)/.installed
	$(BIN)/python -m tests.gpu.training --ranks $(RANKS) --out outputs/gpu-$(RANKS)

docs: $(VENV)/.installed
	$(BIN)/python -m docs.generate

# The stamp is written last: an interrupted installation is taken up again.
$(VENV)/.installed: pyproject.toml launchers/install.py
	$(PYTHON) launchers/install.py $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
