# Everything a contributor types. `make` alone lists it.
#
#   PYTHON=python3.12 make setup     another Python
#   make test ARGS="-k arena -x"     arguments for the command behind a target
#   INFINITY_DEV=1 make test         the development build: warnings are errors, asserts are kept

PYTHON ?= python3
ARGS ?=
VENV_PYTHON := .venv/bin/python

# A Python that the user names must be the one in .venv; otherwise the one that is there stays.
PYTHON_NAMED := $(if $(filter file,$(origin PYTHON)),,--this-python)
SETUP = @command -v "$(PYTHON)" >/dev/null || { echo "setup: error: no $(PYTHON) here: install Python 3.10 or newer," \
	"or name one, as in PYTHON=python3.12 make setup" >&2; exit 1; }; "$(PYTHON)" tools/setup_venv.py $(PYTHON_NAMED)

# One more than there are cores, as tests wait for drives and for each other; beyond four they would only take memory.
TEST_PROCESSES = $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4)))

CXX_FILES = find csrc -name '*.cpp' -o -name '*.h' -o -name '*.hpp'

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-dev setup-docs docs demo demo-words test replay-records test-long torture fuzz test-deepspeed test-transformers test-peft \
	test-accelerate test-trl test-lightning test-deepspeed-own test-integrations test-trainers test-adapters test-torch wheels test-wheel release-check lint lint-style lint-layout lint-types lint-cxx format clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z -]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## everything into .venv; quick when nothing changed
	$(SETUP)

setup-test:
	$(SETUP) test

setup-dev:
	$(SETUP) test dev

setup-docs:
	$(SETUP) docs

demo: demo-words setup ## a model learns from disk, then one that doesn't fit takes steps (ARGS="--help" for the first's options alone)
	$(VENV_PYTHON) examples/train_lm.py $(ARGS)
	$(if $(ARGS),,$(VENV_PYTHON) examples/does_not_fit.py)

demo-words:
	@echo "demo: first .venv is set up if it isn't yet: 2 to 10 minutes, 1.5 GiB of disk (8 GiB with CUDA)"
	@echo "demo: then 40 M parameters are trained from disk: 3 to 5 minutes, 0.5 GiB in .nvme"
	$(if $(ARGS),,@echo "demo: then 1 B parameters step within 4 GiB of memory: 2 to 5 minutes, 13 to 21 GiB in .nvme while it runs")
	@echo "demo: .nvme is in this checkout; Ctrl-C ends the demo and gives the space back"

test: setup-test ## the test suite (ARGS="-k arena -x" for pytest)
	$(VENV_PYTHON) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile \
		--no-loadscope-reorder -m "not long" $(ARGS)

replay-records: setup-test ## write the records of tests/replay again, after a change of what is read when
	INFINITY_RENEW_REPLAYS=1 $(VENV_PYTHON) -m pytest tests/replay $(ARGS)

test-long: setup-test ## what the suite leaves out because it takes minutes
	$(VENV_PYTHON) -m pytest --ignore tests/integrations -m long $(ARGS)

torture: HYPOTHESIS_SEED := $(or $(HYPOTHESIS_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
torture: setup-test ## the fault campaigns with thousands of seeds; an hour or so (SEEDS=300 KILLS=20 INPUTS=100 for less)
	@echo "torture: examples drawn with HYPOTHESIS_SEED=$(HYPOTHESIS_SEED), which draws them again"
	INFINITY_EXAMPLES=$(or $(INPUTS),1000) $(VENV_PYTHON) -m pytest -m "(inputs or hypothesis) and not long" \
		--ignore tests/integrations --hypothesis-seed $(HYPOTHESIS_SEED) --hypothesis-show-statistics $(ARGS)
	INFINITY_FLIPS=$(or $(FLIPS),200) $(VENV_PYTHON) -m pytest tests/aio/test_checksums.py -s $(ARGS)
	INFINITY_FAULT_SEEDS=$(or $(SEEDS),3000) INFINITY_KILLS=$(or $(KILLS),200) INFINITY_FLIPS=$(or $(FLIPS),200) \
		$(VENV_PYTHON) -m pytest tests/faults -s $(ARGS)

fuzz: ## fuzz the C++ core with clang, each program for SECONDS=60
	tools/fuzz.sh $(or $(SECONDS),60)

test-deepspeed test-transformers test-peft test-accelerate test-trl test-lightning: ## an integration, in an environment of its own on top of .venv
	tools/test_integration.sh $(@:test-%=%) $(SHORT) $(ARGS)

test-deepspeed-own: ## DeepSpeed's own tests of its I/O on our handle (DEEPSPEED=its checkout)
	tools/test_deepspeed_own.sh "$(DEEPSPEED)" $(ARGS)

test-integrations: test-trainers test-adapters ## all of them, without what takes minutes

test-trainers: ## the integrations that share no environment, side by side
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target --keep-going SHORT='-m "not long"' \
		test-deepspeed test-transformers test-trl test-lightning

test-adapters: ## the integrations in the environment of transformers, one after the other
	@$(MAKE) --no-print-directory SHORT='-m "not long"' test-peft test-accelerate

test-torch: ## the suite on each torch that we say it works on (TORCH="2.14.1 2.15.0" for others)
	tools/test_torch_versions.sh "$(TORCH)" --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

wheels: ## a source distribution, and wheels for every Python here, checked, in dist/ (ARGS="--help" for its options)
	$(PYTHON) tools/build_wheels.py $(ARGS)

test-wheel: setup-test ## a wheel of this checkout (WHEEL=... for another), used where neither compiler nor liburing is
	$(if $(WHEEL),,rm -rf build/wheel && $(VENV_PYTHON) tools/build_wheels.py --here --out build/wheel)
	$(VENV_PYTHON) tools/test_wheel.py $(or $(WHEEL),build/wheel/*.whl)

release-check: setup-dev ## all that must hold before a release (ARGS="--quick" for a minute or two of it)
	$(VENV_PYTHON) tools/release_check.py $(ARGS)

docs: setup-docs ## README and docs/ as a site, with a picture of a step taken here (ARGS="--help" for its options)
	$(VENV_PYTHON) tools/build_docs.py $(ARGS)

lint: setup-dev ## ruff, mypy --strict, clang-format; changes nothing
	@$(MAKE) --no-print-directory --keep-going lint-style lint-layout lint-types lint-cxx

lint-style:
	$(VENV_PYTHON) -m ruff check --output-format concise .

lint-layout:
	$(VENV_PYTHON) -m ruff format --check .

lint-types:
	$(VENV_PYTHON) -m mypy

lint-cxx:
	$(CXX_FILES) | xargs -r .venv/bin/clang-format --dry-run -Werror

format: setup-dev ## lay out Python and C++ the house's way
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .
	$(CXX_FILES) | xargs -r .venv/bin/clang-format -i

clean: ## remove what was built, but neither .venv nor runs in .nvme
	rm -rf build dist *.egg-info infinity/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean ## the same, .venv with those that stand on it, and .nvme with every durable run in it
	rm -rf .venv .venv-* .nvme
